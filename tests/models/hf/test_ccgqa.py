"""The seam of our CCGQA class: what reaches the ops, what a folder holds, and who can read what we export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.hf.folders import IDS, edit, refused
from tests.tiny import CCGQA, one_pack, random_examples, tiny_model, tiny_policy, with_form
from tuningfork.kernels.ccgqa.plain import PlainCcgqa
from tuningfork.models.ccgqa.modeling_ccgqa import CcgqaConfig, CcgqaForCausalLM
from tuningfork.models.hf import digests, layers, own
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import load
from tuningfork.models.policy import Policy

EXAMPLES = random_examples([(7, (5, 9)), (0, (3, 5)), (1, (1, 2))])
families = pytest.mark.parametrize("family", CCGQA)


class Spy(PlainCcgqa):
    calls: ClassVar[list] = []

    def query_key(self, x, filters, temperature, heads):
        query, key = super().query_key(x, filters, temperature, heads)
        Spy.calls.append((x.dtype, query.dtype, key.dtype, temperature.dtype, tuple(heads)))
        return query, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_give_their_op_what_it_expects(dtype):
    Spy.calls = []
    policy = Policy(tiny_model("ccgqa", torch.float32), with_form("ccgqa", Spy), dtype)
    policy.hidden_rows(one_pack(EXAMPLES, "prompt"))
    assert Spy.calls == [(dtype, dtype, dtype, torch.float32, (4, 2, 8))] * 4


@families
def test_blocks_are_found_with_what_they_cost(family):
    policy = tiny_policy(family)
    assert policy.blocks == list(policy.model.model.layers)
    assert set(policy.ops) == {"attention", "ccgqa", "row_logps"}
    times = policy.config.recursions
    linear = [(name, w) for name, w in policy.model.model.layers.named_parameters() if "proj" in name]
    assert policy.flops().block_weights == sum(w.numel() * (times if "mlp" in name else 1) for name, w in linear)
    assert policy.mixers[0].layers[0].width == policy.config.num_attention_heads * 8


def test_transformers_knows_the_family_by_its_type():
    config = AutoConfig.for_model("tuningfork_ccgqa", num_hidden_layers=1, vocab_size=8, hidden_size=8)
    assert type(config) is CcgqaConfig
    with torch.device("meta"):
        assert type(AutoModelForCausalLM.from_config(config)) is CcgqaForCausalLM


def test_its_own_layers_are_not_told_of_packs():
    policy = tiny_policy("ccgqa")
    with layers.taken_out(policy.model), pytest.raises(TypeError, match="fork"):
        policy.hidden_rows(one_pack(EXAMPLES, "prompt"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ccgqa")
    tiny_model("ccgqa_recursive", torch.bfloat16).save_pretrained(folder / "model")
    save(load(str(folder / "model")), folder / "export")
    return folder


def test_a_folder_is_loaded_and_exported_with_the_same_weights(exported):
    theirs, ours = (load_file(exported / name / "model.safetensors") for name in ("model", "export"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    again = load(str(exported / "export"))
    assert again.notes == ()
    assert again.model.model.embed_tokens.weight is again.model.lm_head.weight


def test_plain_transformers_loads_an_export_by_the_file_in_it(exported, tmp_path):
    """In a process that knows nothing of us."""
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM as auto\n"
        "model = auto.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32).eval()\n"
        "assert 'tuningfork' not in sys.modules\n"
        f"torch.save(model(torch.tensor({IDS.tolist()})).logits.detach(), sys.argv[2])"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", program, str(exported / "export"), str(tmp_path / "logits")]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    mine = load(str(exported / "export")).model
    mine.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits"), mine.eval()(IDS).logits)
    about = json.loads((exported / "export" / "config.json").read_text())
    assert about["auto_map"] == own.FAMILIES["tuningfork_ccgqa"].auto_map


def test_what_a_folder_names_as_its_code_is_never_run(exported, tmp_path):
    folder = tmp_path / "stranger"
    save(load(str(exported / "model")), folder)
    (folder / "modeling_ccgqa.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    (folder / digests.NAME).unlink()
    assert type(load(str(folder)).model) is CcgqaForCausalLM
    assert not (tmp_path / "ran").exists()


def test_settings_that_are_none_are_refused_with_the_folder(exported, tmp_path):
    folder = tmp_path / "model"
    save(load(str(exported / "model")), folder)
    (folder / digests.NAME).unlink()
    edit(folder / "config.json", recursion=3)
    refused(folder, r"config\.json cannot be read: recursion is no setting .* did you mean recursions\?")
    edit(folder / "config.json", recursion=None, value_shift="heads")
    refused(folder, "num_key_value_heads is 3, and value_shift heads")


def test_logits_of_a_loaded_model_are_those_of_its_class(exported):
    plain = AutoModelForCausalLM.from_pretrained(exported / "model", dtype=torch.float32)
    mine = load(str(exported / "model")).model
    mine.set_attn_implementation("sdpa")
    plain.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(mine.eval()(IDS).logits, plain.eval()(IDS).logits)
