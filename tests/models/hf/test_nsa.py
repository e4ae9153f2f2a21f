"""Folders of models with native sparse attention: loaded by their type alone, exported so that others read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.tiny_tokenizers import byte_bpe
from tests.models.hf.folders import IDS, edit, folder_of
from tests.tiny import tiny_policy
from tuningfork import models
from tuningfork.errors import ModelError
from tuningfork.models.hf import nsa
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import load, load_config

PLAIN = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor({ids})
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.") and "tuningfork" not in sys.modules
assert type(model.config) is type(AutoConfig.from_pretrained(folder, trust_remote_code=True))
with torch.no_grad():
    told = model.generate(ids[:1, :9], max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    torch.save((model(input_ids=ids).logits, told), sys.argv[2])
"""


def test_plain_transformers_reads_an_export_by_the_code_in_it(tmp_path: Path) -> None:
    folder_of(tmp_path / "model", "nsa")
    edit(tmp_path / "model" / "config.json", use_cache=None)
    (tmp_path / "model" / "generation_config.json").unlink()  # a model from nothing has none, and none says use_cache
    byte_bpe().save_pretrained(tmp_path / "model")
    loaded = load(str(tmp_path / "model"))
    save(loaded, tmp_path / "export")
    command = [
        sys.executable,
        "-P",
        "-c",
        PLAIN.format(ids=IDS.tolist()),
        str(tmp_path / "export"),
        str(tmp_path / "l"),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    logits, told = torch.load(tmp_path / "l")
    with torch.no_grad():
        assert torch.equal(logits, loaded.model(input_ids=IDS).logits)
        greedy = IDS[:1, :9]
        for _ in range(3):
            greedy = torch.cat([greedy, loaded.model(input_ids=greedy).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(told, greedy)
    again = load(str(tmp_path / "export"))
    assert again.notes == ()  # its auto_map is what we wrote
    assert all(map(torch.equal, again.model.parameters(), loaded.model.parameters()))


def test_code_in_the_folder_is_neither_run_nor_exported(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "nsa")
    for name in ("modeling_nsa.py", "configuration_nsa.py", "other.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "other.X", "AutoModelForCausalLM": "modeling_nsa.X"})
    loaded = load(str(folder))
    save(loaded, tmp_path / "export")
    assert not (tmp_path / "ran").exists()
    ours = Path(models.nsa.__file__).parent
    for name in ("modeling_nsa.py", "configuration_nsa.py", "sequences_nsa.py"):
        assert (tmp_path / "export" / name).read_bytes() == (ours / name).read_bytes()
    assert not (tmp_path / "export" / "other.py").exists()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_nsa.NsaConfig",
        "AutoModel": "modeling_nsa.NsaModel",
        "AutoModelForCausalLM": "modeling_nsa.NsaForCausalLM",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selct_count": 4}, "config.json cannot be read: selct_count is no setting of a model of type tuningfork_nsa; "
                             "did you mean select_count?"),
        ({"block_stride": 3}, "config.json cannot be read: block_stride must divide block_length, and block_stride is "
                              "3 and block_length is 8; "),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_refused_with_the_folder(tmp_path: Path, settings, message) -> None:
    folder = folder_of(tmp_path / "model", "nsa_mean")
    edit(folder / "config.json", **settings)
    with pytest.raises(ModelError) as caught:
        load_config(str(folder))
    assert message in str(caught.value)


def test_what_runs_is_told_of_the_model() -> None:
    """Weights of products are those of its matrices, but for the head's and the compression's, which blocks cost."""
    policy = tiny_policy("nsa")
    attention, sparse = policy.mixers
    assert attention.windows == [9, 9]
    layer, again = sparse.layers
    assert layer == again
    [first] = nsa.layers(policy.model)[:1]
    assert first == layer and len(policy.blocks) == 2
    compression = 2 * (16 * 64 + 8 * 16) + 2 * (24 * 96 + 12 * 24)
    assert layer.compression == compression
    matrices = sum(
        weight.numel() for name, weight in policy.model.model.named_parameters()
        if weight.ndim == 2 and "embed" not in name
    )  # fmt: skip
    assert policy.flops().block_weights == matrices
    assert nsa.layers(tiny_policy("llama").model) == []
