"""The bench of models from nothing: its models and documents, and what its lines say; on a CPU, in small."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import bench
from bench import nothing, scratch, scratch_forms, scratch_runs
from bench.scratch_claims import CLAIMS, RATES, ROWS, unmeasured
from tuningfork.data.packing.loader import build_packs
from tuningfork.errors import ConfigError
from tuningfork.models.head import _Projection
from tuningfork.objective.lm import LM
from tuningfork.report.run.metrics import StepResult

STEP = StepResult(1, 0.1, 1e-3, 1.0, 4, 0.5, 4, 100, 80, 40, 1000, 16, 2.0, 0.1, 1e9)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_models_are_those_of_the_recipes():
    assert {"scratch-tiny", "ccgqa-tiny", "hydra-100m"} <= nothing.RECIPES.keys()
    assert nothing.twin("hydra-100m") == "hydra-100m-dense" and nothing.twin("scratch-tiny") is None
    assert nothing.settings("hydra-100m")["vocab_size"] == 50257 and nothing.settings("ccgqa-tiny")["vocab_size"] == 320
    assert nothing.config("ccgqa-tiny", positions=4096).max_position_embeddings == 4096
    assert nothing.config("ccgqa-tiny", layers=1).num_hidden_layers == 1


def test_documents_are_of_one_length_and_all_but_a_first_token_is_predicted():
    documents = nothing.documents(3, 20, vocabulary=50)
    assert [document.plain_tokens for document in documents] == [20] * 3
    assert LM().totals(documents).tokens == 3 * 19
    assert not any(LM().refusal(document) for document in documents)
    assert len({document.content for document in documents}) == 3


def test_a_rate_leaves_out_the_first_steps_and_wants_equal_ones():
    seconds = [90.0, 5.0, 1.0, 2.0, 3.0]
    steps = [replace(STEP, step=n, seconds=s, compilations=n == 4) for n, s in enumerate(seconds, start=1)]
    assert scratch_runs.tokens_per_second(iter(steps)) == {"tokens_s": 50.0, "step_s": 2.0, "late": 1}
    with pytest.raises(AssertionError, match="no rate in common"):
        scratch_runs.tokens_per_second(iter([*steps, replace(STEP, step=6, tokens=99)]))


def test_lengths_that_differ_by_much_show():
    assert scratch._spread({256: 1.0, 512: 40.0, 8192: 20.0, 32768: 1.0}) == 2.0
    assert scratch._spread({64: 30.0, 128: 20.0}) == 1.5
    assert scratch._spread({}) is None


class Planted:
    """Training steps of a made-up model: seconds of a token are 10 us, and `quadratic` of them for each it sees."""

    def __init__(self, quadratic: float, tokens: int) -> None:
        self.quadratic, self.tokens = quadratic, tokens

    def steps(self, length: int, steps: int):
        seconds = self.tokens * (1e-5 + self.quadratic * length)
        return (replace(STEP, step=n, tokens=self.tokens, seconds=seconds) for n in range(1, steps + 1))


def test_a_sweep_over_lengths_finds_quadratic_work_and_says_where(monkeypatch, tmp_path):
    planted = {"nsa-tiny": 1e-8, "nsa-tiny-dense": 1e-11}
    monkeypatch.setattr(scratch, "begin", lambda name, tokens, most: Planted(planted[name], tokens))
    out = tmp_path / "lines.jsonl"
    lengths = [str(2**n) for n in range(7, 14)]  # 128 to 8,192, the last of which takes 9 times as long as needed
    scratch.main(["--parts", "lengths", "--models", "nsa-tiny", "--lengths", *lengths, "--out", str(out)])
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    found = {line["model"]: line for line in lines if line["what"] == "max/min of tokens/s"}
    slow, even = found["nsa-tiny"], found["nsa-tiny-dense"]
    assert slow["ours"] == pytest.approx((1 + 8.192) / (1 + 0.512), abs=1e-3)
    assert even["ours"] == pytest.approx(1, abs=0.01) and even["note"] == ""
    assert "fall with the length from 1,024 on: 49,407 there, 88,652 at 128; from 512 to 8,192" in slow["note"]
    assert "grows as S^0.65" in slow["note"]  # log((1 + 8.192) / (1 + 0.512)) / log(16)
    assert scratch.falls({512: 50.0, 1024: 100.0, 2048: 98.0}) == scratch.falls({}) == ""


def test_the_lines_say_what_is_measured_and_what_a_cpu_cannot_tell(capsys, tmp_path):
    sizes = ["--models", "ccgqa-tiny", "--lengths", "32", "64", "--tokens", "128", "--steps", "3"]
    scratch.main(
        [
            "--parts",
            "lengths",
            "activations",
            "tf32",
            "compile",
            "graphs",
            *sizes,
            "--out",
            str(tmp_path / "lines.jsonl"),
        ]
    )
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert all({"row", "what", "model", "ours", "unit", "note", "device", "torch"} <= line.keys() for line in lines)
    rates = {(line["model"], line["at"]): line for line in lines if line["what"] == "tokens/s"}
    assert set(rates) == {(name, length) for name in ("ccgqa-tiny", "ccgqa-tiny-dense") for length in (32, 64)}
    assert {line["tokens_per_step"] for line in rates.values()} == {128}
    beside = {line["at"]: line["ours"] for line in lines if line["what"] == "tokens/s over the dense twin's"}
    for length, ratio in beside.items():
        of_each = (rates[name, length]["ours"] for name in ("ccgqa-tiny", "ccgqa-tiny-dense"))
        ours, dense = of_each
        assert ratio == pytest.approx(ours / dense, abs=1e-3)
    found = {line["what"]: line for line in lines}
    assert found["activations block: gradients equal to the bit"]["ours"] is True
    assert found["activations block: memory"]["ours"] is None
    assert {line["note"] for line in lines if line["row"] == "H1" or "memory" in line["what"]} == {scratch.NEEDS_GPU}
    assert [(line["ours"], line["note"]) for line in lines if line["row"] in ("H8", "H12")] == [
        (None, scratch.NEEDS_GPU)
    ] * 2
    printed = capsys.readouterr().out
    assert "max/min of tokens/s" in printed
    without = printed.split("no number in this call; proof")[1]
    listed = {words[0] for words in map(str.split, without.splitlines()) if words and words[0] in ROWS}
    # Of a model with neither a claim on its tokens/s nor a GPU: checkpointing, and how far apart lengths are.
    assert listed == ROWS.keys() - {"N3", "H5"}


def test_the_head_is_held_against_float64():
    assert all(0 < error <= 1e-6 for error, _ in scratch.head_errors(64, 32, 101, chunk_rows=24).values())
    exact = _Projection.logits
    with patch.object(_Projection, "logits", lambda self, rows: exact(self, rows).bfloat16().float()):
        assert all(error > 1e-6 for error, _ in scratch.head_errors(64, 32, 101, chunk_rows=24).values())


def test_moments_in_float32_take_8_bytes_a_weight():
    work = scratch_runs.begin("ccgqa-tiny", 64, 32)
    found = scratch_runs.state_bytes(work, 32, 3)
    assert found["bytes_a_weight"] == 8.0 and 4 < found["loss"] < 7


def test_a_pass_gives_the_gradients_of_a_pack_that_is_put_in_anothers_place():
    work = scratch_runs.begin("ccgqa-tiny", 64, 32)
    first, second = (build_packs(nothing.documents(2, 32, work.vocabulary, seed), work.limits)[0] for seed in (0, 1))
    once, other = scratch_forms.Pass(work, first), scratch_forms.Pass(work, second)
    truth = other.numbers(other())
    assert truth.keys() == {"loss", "log-probs", *dict(work.model.named_parameters())}
    assert scratch_forms.changed(once.numbers(once()), truth).keys() == truth.keys()
    once.load(second)
    assert scratch_forms.changed(once.numbers(once()), truth) == {}
    [longer] = build_packs(nothing.documents(1, 64, work.vocabulary), work.limits)
    with pytest.raises(ValueError, match="differ in their sizes"):
        once.load(longer)


def test_forms_are_the_classes_own_blocks_or_the_whole_backbone_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compiled.append((self, how)))
    work = scratch_runs.begin("ccgqa-tiny", 64, 32)
    policy = work.session.policy
    policy.blocks[0].forward = lambda *given, **named: None
    scratch_forms.in_form(work, "ours")
    assert "forward" in vars(policy.blocks[0])
    scratch_forms.in_form(work, "eager")
    assert policy.blocks[0].forward.__func__ is type(policy.blocks[0]).forward and not compiled
    scratch_forms.in_form(work, scratch_forms.TUNED)
    assert compiled == [(policy.model.base_model, {"mode": "max-autotune-no-cudagraphs", "dynamic": False})]


def test_a_form_that_fails_or_takes_too_long_is_a_note():
    assert scratch_forms.in_time(0.01, time.sleep, 60)["note"].startswith("ended after 0 s")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    scratch_forms._answer(theirs, nothing.recipe, ("no such",))
    assert ours.recv()["note"] == "nothing.py:31 recipe: failed: KeyError: 'no such'"
    with pytest.raises(ConfigError) as refused:
        scratch_runs.begin("ccgqa-tiny", 64, 32, activation_memory="budget:0.5")
    assert scratch_forms.refusing(refused.value).startswith("tuningfork/models/activations.py:")


def test_lines_of_forms_and_graphs_are_ratios_or_say_what_went_wrong(monkeypatch, tmp_path):
    answers = {
        ("m", "eager"): {"note": "", "tokens_s": 50.0},
        ("m", "ours"): {"note": "", "tokens_s": 100.0},
        ("m", scratch_forms.TUNED): {"note": "ended after 300 s, with no result"},
        ("m", 8192): {"note": "", "plain_tokens_s": 50.0, "graph_tokens_s": 60.0, "equal": True, "host_reads": ""},
        ("m", 65536): {"note": "", "plain_tokens_s": 50.0, "host_reads": "models/policy.py:1 f"},
    }
    monkeypatch.setattr(scratch, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(scratch_forms, "in_time", lambda seconds, measure, *given: dict(answers[given[:2]]))
    options = scratch.Options(["m"], [512], 65536, 12, 500, 16, 300, None)
    found = {line["what"]: (line["ours"], line["note"]) for line in scratch.forms(options)}
    assert found == {
        "steps, eager: tokens/s": (50.0, ""),
        "steps, ours: tokens/s": (100.0, ""),
        f"steps, {scratch_forms.TUNED}: tokens/s": (None, "ended after 300 s, with no result"),
        "ours over eager": (2.0, ""),
    }
    lines = list(scratch.graphs(options))
    assert [(line["ours"], line["note"]) for line in lines] == [
        (1.2, ""),
        (True, ""),
        (None, "host read: models/policy.py:1 f"),
        (None, ""),
    ]


def test_every_row_of_both_reports_has_a_proof_that_there_is_and_that_its_page_names():
    assert list(ROWS) == [*(f"N{n}" for n in range(1, 23)), *(f"H{n}" for n in range(1, 19))]
    rows = [*CLAIMS.values(), *RATES.values()]
    assert {claim.row for claim in rows} <= ROWS.keys()
    root = Path(bench.__file__).parents[1]
    log = " ".join((root / "docs/log.md").read_text().split())
    page = (root / "docs/from_scratch.md").read_text()
    told = dict(zip(ROWS, re.findall(r"^\| \d+ \| .*$", page, re.MULTILINE), strict=True))
    for row, (_, proofs) in ROWS.items():
        for proof in proofs:
            if proof.startswith("log: "):
                assert proof.removeprefix("log: ") in log, (row, proof)
            elif proof.startswith("python -m "):
                assert (root / f"{proof.split()[2].replace('.', '/')}.py").is_file(), (row, proof)
            else:
                path, _, test = proof.partition("::")
                assert (f"def {test}(" if test else "") in (root / path).read_text(), (row, proof)
                assert proof in told[row] or told[row].endswith("| as N18 |"), (row, proof)
    assert [row for row, (_, proofs) in ROWS.items() if not proofs] == ["N17"]


def test_rows_with_a_number_are_not_listed_again():
    measured = [{"row": row, "ours": None if row == "H1" else 1} for row in ROWS if row not in ("N9", "N17")]
    assert [(line["row"], line["proof"]) for line in unmeasured(measured)] == [
        *zip(("N9", "", ""), ROWS["N9"].proofs, strict=True),
        ("N17", "nothing to set; see docs/from_scratch.md"),
        *zip(("H1", "", ""), ROWS["H1"].proofs, strict=True),
    ]
