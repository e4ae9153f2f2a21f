"""Exports as transformers 4 reads them, and servers built on it: the same model, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.tiny_tokenizers import CHATML, SPECIAL, byte_bpe
from tests.models.hf.folders import edit, folder_of
from tests.older_transformers import RELEASE, read_by_older_transformers
from tests.real_tokenizers import Unavailable
from tests.tiny import one_pack, random_examples, scorer_of
from tuningfork.kernels.select import plain
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import load, load_tokenizer
from tuningfork.models.policy import Policy

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
PLAIN = {"rope_type": "default"}

ROPE: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, **LLAMA3},
    "qwen2": {"rope_theta": 1e6, **PLAIN},
    "qwen3": {"rope_theta": 1e6, **YARN},
    "olmo2": {"rope_theta": 5e5, **PLAIN},
    "mistral": {"rope_theta": 1e6, **PLAIN},
    "gemma2": {"rope_theta": 2e4, **PLAIN},
    "gemma3": {
        "full_attention": {"rope_theta": 1e6, **LINEAR},
        "sliding_attention": {"rope_theta": 1.5e4, **PLAIN},
    },
    "granite": {"rope_theta": 1e7, **PLAIN},
    "cohere": {"rope_theta": 8e6, **PLAIN},
}
"""Family -> rotary settings as transformers 5 writes them, none of them a default."""

EXAMPLES = random_examples([(30, (40, 25)), (3, (60, 50)), (90, (1, 70))])
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<s> Because </s>"}]


def starting_folder(path: Path, family: str) -> Path:
    folder_of(path, family)
    edit(path / "config.json", rope_parameters=ROPE[family])
    byte_bpe([("Ġ", "a")], chat_template=CHATML, pad="</s>", adds_bos=True).save_pretrained(path)
    return path


def job(folder: Path) -> dict[str, Any]:
    answers = [(e.prompt_ids.tolist(), answer.ids.tolist()) for e in EXAMPLES for answer in e.answers]
    return {"folder": str(folder), "sequences": answers, "turns": TURNS}


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """(family -> starting folder, what the older library finds in the exports, and in three other folders)."""
    root = tmp_path_factory.mktemp("older")
    starting = {family: starting_folder(root / family, family) for family in ROPE}
    jobs = {}
    for family, folder in starting.items():
        save(load(str(folder)), root / "export" / family)
        jobs[family] = job(root / "export" / family)
    jobs["as version 5 writes it"] = job(starting["llama"])

    # A folder that version 4 wrote: what it says is its own names for the same.
    older = starting_folder(root / "older", "llama")
    edit(older / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3, dtype=None)
    edit(older / "config.json", torch_dtype="float32", transformers_version="4.57.6")
    jobs["before"] = job(older)
    save(load(str(older)), root / "export" / "older")
    jobs["after"] = job(root / "export" / "older")
    try:
        found = read_by_older_transformers(jobs, root)
    except Unavailable as error:
        pytest.skip(str(error))
    assert f"transformers=={found['version']}" == RELEASE
    return starting, found["jobs"]


@pytest.mark.parametrize("family", ROPE)
def test_log_probs_of_an_export_are_ours(read, family):
    starting, found = read
    assert "error" not in found[family], found[family]
    policy = Policy(load(str(starting[family])).model, plain(), torch.float32)
    ours = scorer_of(policy).score(one_pack(EXAMPLES, share="prompt", tokens=512))
    theirs = torch.tensor(found[family]["log_probs"], dtype=torch.float64)
    # Sums of up to 70 log-probs in float32, by other kernels in another order.
    torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ROPE)
def test_tokens_of_an_export_are_ours(read, family):
    starting, found = read
    tokenizer, theirs = load_tokenizer(str(starting[family])), found[family]
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    ids = tokenizer(text).input_ids
    assert (theirs["text"], theirs["ids"]) == (text, ids)
    assert theirs["back"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert theirs["special"] == sorted(SPECIAL)


def test_what_version_5_writes_reads_otherwise(read):
    """Guards the tests above: without the older names theta is 10,000, and the tokenizer does not load."""
    _, found = read
    wrong, right = found["as version 5 writes it"], found["llama"]
    assert max(abs(a / b - 1) for a, b in zip(wrong["log_probs"], right["log_probs"], strict=True)) > 1e-4
    assert "error" in wrong


def test_a_folder_of_version_4_reads_there_as_before(read):
    _, found = read
    assert found["after"]["log_probs"] == found["before"]["log_probs"] == found["llama"]["log_probs"]
