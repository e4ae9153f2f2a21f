"""The needle: what its documents ask, what a window sees of it, and that it runs. What is learnt stands in no test."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import needle
from tests.tiny import one_pack
from tuningfork.kernels.select import plain
from tuningfork.models.policy import Policy

SIZE = needle.Size(block=2, width=16)


def test_values_that_are_asked_for_stand_behind_their_keys_out_of_reach() -> None:
    for example in needle.documents(20, 128, SIZE.out_of_reach, seed=1):
        answer = example.answers[0]
        ids = np.concatenate([example.prompt_ids, answer.ids])
        assert len(ids) == 128 and answer.mask.sum() == needle.PAIRS
        asked = 128 - 2 * needle.PAIRS
        body, questions = ids[:asked].tolist(), ids[asked:].reshape(-1, 2).tolist()
        assert sorted(key for key, _ in questions) == list(range(needle.PAIRS))
        assert answer.ids[answer.mask].tolist() == [value for _, value in questions]
        for key, value in questions:
            [place] = [n for n, token in enumerate(body) if token == key]
            assert body[place + 1] == value and place + 1 < asked - SIZE.out_of_reach


def test_a_model_with_its_window_alone_reads_no_further() -> None:
    """A change of a token reaches as far as windows carry it; with open gates it reaches the end."""
    [example] = needle.documents(1, 128, SIZE.out_of_reach, seed=1)
    for closed in (True, False):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SIZE.config(128))
        if closed:
            needle.window_alone(model)
        policy = Policy(model, plain(), torch.float32)
        batch = one_pack([example], "none", tokens=128)
        with torch.no_grad():
            before = policy.hidden_rows(batch)
            batch.input_ids[128 - 2 * needle.PAIRS - SIZE.out_of_reach - 1] += 1
            assert torch.equal(policy.hidden_rows(batch), before) == closed


def test_recall_is_the_share_of_values_that_are_likeliest(capsys) -> None:
    small = ["--train", "64", "--width", "16", "--longer", "2", "--steps", "3", "--tokens", "128", "--asked", "3"]
    needle.main(small)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["model"], line["asked_at"]) for line in lines] == [
        (name, length) for name in ("nsa", "window") for length in (64, 128)
    ]
    assert all(line["block"] == 2 and line["stages"] == ["64x3"] for line in lines)
    assert all(line["recall"] * 3 * needle.PAIRS in range(13) and line["loss"] > 0 for line in lines)


def test_stages_follow_one_another_with_blocks_of_a_length_that_is_said(capsys) -> None:
    small = ["--block", "4", "--width", "16", "--stages", "64x2", "96x1", "--asked", "2", "--ask", "64", "128"]
    needle.main([*small, "--tokens", "128", "192", "--learning_rate", "0.003", "0.001"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["model"], line["asked_at"]) for line in lines] == [
        (name, length) for name in ("nsa", "window") for length in (64, 128)
    ]
    about = {"trained_at": 96, "block": 4, "stages": ["64x2", "96x1"], "steps": 3}
    assert all(about.items() <= line.items() for line in lines)
    assert needle._stages(["64x2", "96x1"], [128, 192], [0.003]) == [(64, 2, 128, 0.003), (96, 1, 192, 0.003)]
    config = needle.Size(4, 64).config(8192)
    assert (config.block_length, config.block_stride, config.select_length, config.window) == (4, 2, 8, 16)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--stages", "64"], "'64' is not LENGTHxSTEPS"),
        (["--stages", "64x2", "128x2", "--tokens", "64", "128", "256"], "--tokens: 3 of 2 stages"),
        (["--train", "64", "--tokens", "32"], "32 of a step hold no document of 64"),
        (["--train", "32"], "--block: 1 is not an even number"),
        (["--block", "16", "--train", "128"], "a document of 128 has no room out of two windows' reach; 144 has"),
    ],
)
def test_what_cannot_be_asked_is_said(given, said, capsys) -> None:
    with pytest.raises(SystemExit):
        needle.main(given)
    assert said in capsys.readouterr().err
