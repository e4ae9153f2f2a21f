"""`tuningfork train`: what a finished run leaves behind, and that its numbers are right."""

from __future__ import annotations

import json
import math
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.workbench import CHATML, Job, make_model, make_pairs, state_of, write_rows
from tuningfork.data.packing.tree import in_common
from tuningfork.objective.pairs import DPO
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.metrics import training_definitions


def sequences(row: dict[str, str]) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) as the ChatML template prints them, the end marker counted as the answer's."""
    prompt = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, row["chosen"] + "<|im_end|>", row["rejected"] + "<|im_end|>"


def test_folder_holds_what_is_promised_and_nothing_half_written(finished: Job) -> None:
    """config, metrics, reports, checkpoints, model, log and TensorBoard; no *.partial is left."""
    expected = {"config.yaml", "metrics.jsonl", "data_rows.json", "checkpoints", "model", "log.txt", "tensorboard"}
    found = {path.name for path in finished.run.iterdir()} - {"evaluations"}  # of `tuningfork eval`, another test's
    assert found == expected | {"eval.json", "summary.json", "export.json"}
    assert not list(finished.folder.rglob("*.partial"))


def test_config_yaml_reloads_to_the_same_settings(finished: Job, tmp_path: Path) -> None:
    """The folder's config.yaml, given as a recipe without flags, is the very same job, of the day that it began."""
    path = finished.run / "config.yaml"
    kept = from_yaml(path.read_text(), "here")
    assert load_run_config(path, [], "tuningfork train") == kept != RunConfig()
    from_flags = load_run_config(None, finished.arguments("train")[1:], "tuningfork train")
    assert from_flags.differing(kept) == {"data.date": (None, kept.data.date)}
    assert date.fromisoformat(str(kept.data.date)) <= date.today()


def test_every_line_of_metrics_has_exactly_the_defined_keys(finished: Job) -> None:
    """30 steps, 30 lines, in order, each with the numbers that are defined, in their order."""
    lines = finished.metrics()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(list(line) == list(training_definitions(DPO.statistics_defined)) for line in lines)
    assert [line["epoch"] for line in lines] == pytest.approx([n / 10 for n in range(1, 31)])
    assert all(value is None or math.isfinite(value) for line in lines for value in line.values())


def test_first_loss_is_ln_2_and_the_margin_exactly_zero(finished: Job) -> None:
    """Before the first step the policy is the reference: margin 0, accuracy a tie, loss -log sigmoid(0)."""
    first = finished.metrics()[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-15)
    assert first["rewards/margin"] == first["rewards/chosen"] == first["rewards/rejected"] == 0.0
    assert first["rewards/accuracy"] == 0.5


def test_training_raises_the_margin_on_training_and_held_out_pairs(finished: Job) -> None:
    """With a large learning rate the kind answers win clearly over the curt ones."""
    last = finished.metrics()[-1]
    assert last["rewards/margin"] > 2 and last["rewards/accuracy"] == 1.0 and last["loss"] < 0.2
    scores = json.loads((finished.run / "eval.json").read_text())
    assert scores["before"]["rewards/margin"] == 0.0 and scores["before"]["rewards/accuracy"] == 0.5
    assert scores["before"]["loss"] == pytest.approx(math.log(2), rel=1e-15)
    assert scores["after"]["rewards/margin"] > 1 and scores["after"]["loss"] < scores["before"]["loss"]
    assert scores["before"]["pairs"] == scores["after"]["pairs"] == 11


def test_tokens_are_those_counted_by_hand(finished: Job, shelf: Path) -> None:
    """Over each epoch: tokens count the prompt twice, unique_tokens once, answer_tokens only what is learnt."""
    tokenizer = AutoTokenizer.from_pretrained(shelf / "model")
    tokens = unique = answers = 0
    for row in map(json.loads, (shelf / "pairs.jsonl").read_text().splitlines()):
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in sequences(row)]
        p, chosen, rejected = map(len, ids)
        tokens, answers = tokens + 2 * p + chosen + rejected, answers + chosen + rejected
        unique += p + chosen + rejected - in_common(*map(np.array, ids[1:]))  # what both begin with is there once
    lines = finished.metrics()
    for epoch in (lines[:10], lines[10:20], lines[20:]):
        assert sum(line["tokens"] for line in epoch) == tokens
        assert sum(line["unique_tokens"] for line in epoch) == unique
        assert sum(line["answer_tokens"] for line in epoch) == answers
        assert sum(line["examples"] for line in epoch) == 40
    for line in lines:  # the rows of all packs together are a multiple of 64
        rows = line["unique_tokens"] / (1 - line["pad_share"])
        assert rows == pytest.approx(round(rows)) and round(rows) % 64 == 0
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"])


def test_logps_are_those_of_plain_transformers(finished: Job, shelf: Path) -> None:
    """Held-out log-probs before training equal a plain forward pass over each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(shelf / "model", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(shelf / "model")
    means = []
    for answer in (1, 2):
        sums = []
        for row in map(json.loads, (shelf / "held_out.jsonl").read_text().splitlines()):
            prompt, text = sequences(row)[0], sequences(row)[answer]
            p = len(tokenizer(prompt, add_special_tokens=False).input_ids)
            ids = tokenizer(prompt + text, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                logps = model(ids).logits[0].double().log_softmax(-1)
            sums.append(float(logps[:-1].gather(1, ids[0, 1:, None])[p - 1 :].sum()))
        means.append(np.mean(sums))
    before = json.loads((finished.run / "eval.json").read_text())["before"]
    assert [before["logps/chosen"], before["logps/rejected"]] == pytest.approx(means, rel=1e-6)


def test_learning_rate_rises_then_falls_to_zero(finished: Job) -> None:
    """Warm-up over a tenth of the 30 steps, then a straight line that would reach 0 with step 31."""
    rates = [line["lr"] for line in finished.metrics()]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3]) and rates[3] == pytest.approx(3e-3)
    assert all(a > b for a, b in pairwise(rates[3:])) and rates[-1] == pytest.approx(3e-3 / 27)


def test_keep_last_is_honoured(finished: Job) -> None:
    """Saved at 4, 8, ... 28 and at the last step; the newest three stay."""
    assert finished.checkpoints() == ["step-24", "step-28", "step-30"]


def test_report_accounts_for_every_row(job: Job) -> None:
    """rows_read = used + dropped; each dropped row stands in the list once, with its reason."""
    rows: list[dict[str, Any]] = list(make_pairs(12))
    rows[3] = rows[3] | {"rejected": rows[3]["chosen"]}
    rows[5] = rows[5] | {"chosen": " "}
    rows[8] = rows[8] | {"prompt": "long " * 200}
    rows[9] = rows[9] | {"rejected": None}
    write_rows(job.folder / "pairs.jsonl", rows)
    job = job.but(data={"train": job.folder / "pairs.jsonl", "eval": job.folder / "pairs.jsonl"})
    shown = job.done().out.splitlines()
    reasons = "(1 chosen equals rejected, 1 empty answer, 1 longer than max_length, ...)"
    assert shown.count(f"pairs.jsonl: 12 rows read, 8 used, 4 dropped {reasons}") == 2
    assert f"{job.run / 'data_rows.json'}: each dropped row with its reason" in shown
    path = job.folder / "pairs.jsonl"
    assert f"! data.eval and data.train name the same file, {path}: its rows are no held-out ones" in shown
    for part in (job.report(), job.report("eval")):
        assert part["rows_read"] == 12 and part["used"] == 8
        assert part["rows_read"] == part["used"] + sum(part["dropped"].values())
        assert {row["row"]: row["reason"] for row in part["dropped_rows"]} == {
            4: "chosen equals rejected",
            6: "empty answer",
            9: "longer than max_length",
            10: "null field",
        }
    assert sum(line["examples"] for line in job.metrics()) == 8


def test_export_loads_with_plain_transformers_and_is_the_trained_model(finished: Job) -> None:
    """AutoModelForCausalLM gives, to the bit, the logits of the last checkpoint's weights."""
    exported = AutoModelForCausalLM.from_pretrained(finished.run / "model", attn_implementation="eager")
    trained = AutoModelForCausalLM.from_config(exported.config, attn_implementation="eager")
    state = state_of(finished.run / "checkpoints" / "step-30")
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    assert weights.keys() == exported.state_dict().keys()
    trained.load_state_dict(weights)
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        assert torch.equal(exported.eval()(ids).logits, trained.eval()(ids).logits)
    assert not (finished.run / "model" / "optimizer.pt").exists()
    assert "tuningfork" not in (finished.run / "model" / "config.json").read_text()


def test_export_has_tokenizer_and_chat_template(finished: Job, shelf: Path) -> None:
    """AutoTokenizer gives the same ids and prints the same conversation as the starting model's."""
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (finished.run / "model", shelf / "model"))
    assert ours.chat_template == theirs.chat_template == CHATML
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id) == (2, 0)
    assert ours.get_vocab() == theirs.get_vocab()
    turns = [{"role": "user", "content": "bread ä 42"}]
    assert ours.apply_chat_template(turns, add_generation_prompt=True) == theirs.apply_chat_template(
        turns, add_generation_prompt=True
    )


def test_export_follows_the_starting_models_dtype_unless_told(job: Job) -> None:
    """A model stored in bfloat16 is exported in bfloat16, float32 on request; both are the trained weights."""
    make_model(job.folder / "model", dtype=torch.bfloat16)
    job = job.but({"model.path": job.folder / "model", "train.max_steps": 2})
    said = "exporting the model in bfloat16, which rounds small updates away; output.export_dtype: float32 keeps"
    assert said in job.done().out
    assert (
        "exporting the model in float32\n" in job.but({"output.export_dtype": "float32"}).elsewhere("full").done().out
    )
    half, full = job.exported(), job.elsewhere("full").exported()
    assert {weight.dtype for weight in half.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in full.values()} == {torch.float32}
    assert all(torch.equal(half[key], full[key].bfloat16()) for key in full)


def test_config_of_a_bfloat16_export_says_bfloat16(job: Job) -> None:
    """config.json names the dtype of the weights beside it, so that others load the model in that dtype."""
    job = job.but({"output.export_dtype": "bfloat16", "train.max_steps": 1})
    job.done()
    assert {weight.dtype for weight in job.exported().values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(job.run / "model").dtype == torch.bfloat16


def test_a_run_without_sinks_is_the_same_run(job: Job) -> None:
    """Same numbers, no folder of a sink; and a sink that its continuation names gets the steps from there on."""
    for name, sinks in {"none": "[]", "board": "[tensorboard]"}.items():
        job.but({"output.dir": job.folder / name, "output.sinks": sinks, "train.max_steps": 2}).done()
    none, board = (job.but({"output.dir": job.folder / name}) for name in ("none", "board"))
    assert not (none.run / "tensorboard").exists() and (board.run / "tensorboard").is_dir()
    assert [line["loss"] for line in none.metrics()] == [line["loss"] for line in board.metrics()]
    none.but({"train.max_steps": 3}).done("train", "--resume")
    events = EventAccumulator(str(none.run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [3]


def test_tensorboard_shows_the_numbers_of_metrics(finished: Job) -> None:
    """Every number of metrics.jsonl that is not null, and the held-out scores, are scalars."""
    board = EventAccumulator(str(finished.run / "tensorboard"))
    board.Reload()
    lines = finished.metrics()
    shown = {key for key, value in lines[0].items() if value is not None and key != "step"}
    tags = set(board.Tags()["scalars"])
    assert {tag for tag in tags if not tag.startswith("eval/")} == shown
    losses = [(event.step, event.value) for event in board.Scalars("loss")]
    assert losses == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]
    assert [event.step for event in board.Scalars("eval/rewards/margin")] == [0, 30]


def test_summary_adds_up(finished: Job) -> None:
    """summary.json counts the whole run; its rates are its totals divided by its own seconds."""
    summary, lines = json.loads((finished.run / "summary.json").read_text()), finished.metrics()
    assert (summary["first_step"], summary["last_step"], summary["steps"], summary["examples"]) == (1, 30, 30, 120)
    assert summary["tokens"] == sum(line["tokens"] for line in lines)
    assert summary["seconds"] == pytest.approx(sum(line["step_s"] for line in lines))
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["seconds"])
    phases = ["imports", "data", "device", "weights", "self-check", "head check"]
    phases += ["weights digest", "reference", "step-0 check"]
    assert list(summary["startup_seconds"]) == [*phases, "evaluation"]
    assert all(seconds >= 0 for seconds in summary["startup_seconds"].values())


def test_screen_says_what_was_done_and_where_it_lies(job: Job) -> None:
    """The last lines name the check, the counts and every place; nothing goes to standard error."""
    outcome = job.done()
    for text in (
        "rows read",
        "step-0 check: margin exactly 0 for all 4 pairs",
        str(job.run / "model"),
        "metrics.jsonl",
    ):
        assert text in outcome.out, text
    assert outcome.err == ""


def test_the_end_says_how_training_went_without_held_out_pairs(job: Job) -> None:
    """Loss, margin and accuracy of the training pairs."""
    job = job.but(output={"log_every": 1})
    out, (first, *_, last) = job.done().out, job.metrics()
    lines = out.partition("training pairs: ")[2].splitlines()
    assert lines[2].split() == ["step", "1", "step", "10"]
    assert {line.split()[0]: line.split()[1:] for line in lines[3:7]} == {
        "accuracy": [f"{line['rewards/accuracy']:.1%}" for line in (first, last)],
        "margin": ["0", f"{last['rewards/margin']:.4g}"],
        "loss": ["0.6931", f"{last['loss']:.4g}"],
        "pairs": ["4", "4"],
    }
    assert "model flops utilisation" not in out  # whose peak nobody knows on a CPU


def test_losses_with_and_without_an_sft_term_are_told_apart(job: Job, shelf: Path) -> None:
    """On the line of progress, between the two, and in the tables at the end."""
    job = job.but({"objective.sft_weight": 1.0, "data.eval": shelf / "held_out.jsonl", "train.max_steps": 2})
    out = job.done().out
    progress, trained, held = out.index("training: 2/2 steps, loss with SFT term "), *map(out.index, _TITLES)
    assert (
        out.index("the loss of steps is the loss with SFT term, that of held-out pairs the loss without SFT term")
        < progress
    )
    assert out.index("loss with SFT term ", trained) < held < out.index("loss without SFT term ", held)
    plain = job.but({"objective.sft_weight": 0.0}).elsewhere("plain").done().out
    assert "SFT" not in plain and "training: 2/2 steps, loss 0." in plain


_TITLES = ("training pairs: first and last line of metrics.jsonl\n", "held-out pairs\n")


def test_log_has_what_the_screen_had(job: Job) -> None:
    """log.txt is the whole story, from reading the data to the summary."""
    shown, log = job.done().out, (job.run / "log.txt").read_text()
    start = ("reading pairs.jsonl", "reading weights", "parameters on cpu", "start-up: imports", "step-0 check")
    for text in (*start, "training: 10/10 steps", "exported model"):
        assert text in shown and text in log, text


def test_an_epoch_uses_every_example_exactly_once(job: Job) -> None:
    """G7: 13 pairs in steps of 4: 4, 4, 4 and the 1 that is left."""
    write_rows(job.folder / "pairs.jsonl", make_pairs(13))
    job = job.but({"data.train": job.folder / "pairs.jsonl"})
    job.done()
    assert [line["examples"] for line in job.metrics()] == [4, 4, 4, 1]
    assert job.metrics()[-1]["epoch"] == 1.0


@pytest.mark.parametrize(("epochs", "said"), [(1, "the run is one step"), (3, "a step has some more than once")])
def test_more_examples_in_a_step_than_there_are(job: Job, epochs: int, said: str) -> None:
    write_rows(job.folder / "pairs.jsonl", make_pairs(3))
    job = job.but({"data.train": job.folder / "pairs.jsonl", "train.examples_per_step": 5, "train.epochs": epochs})
    assert f"! train.examples_per_step is 5, but 3 examples are all: {said}" in job.done().out.splitlines()
    assert [step["examples"] for step in job.metrics()] == ([3] if epochs == 1 else [5, 4])


def test_each_epoch_has_an_order_of_its_own(finished: Job) -> None:
    """The batches of an epoch are not those of the one before."""
    tokens = [line["tokens"] for line in finished.metrics()]
    assert len({tuple(tokens[:10]), tuple(tokens[10:20]), tuple(tokens[20:])}) == 3


def test_batch_larger_than_the_data(job: Job) -> None:
    """3 pairs, steps of 32: one step with all of them."""
    write_rows(job.folder / "pairs.jsonl", make_pairs(3))
    job = job.but({"data.train": job.folder / "pairs.jsonl", "train.examples_per_step": 32})
    job.done()
    assert [(line["step"], line["examples"]) for line in job.metrics()] == [(1, 3)]


def test_lines_that_cover_three_steps_add_up_to_those_that_cover_one(job: Job, filled_cache: Path) -> None:
    """log_every changes how often lines are written, not what they say: same tokens, same mean losses."""
    job = job.but({"reference.cache": filled_cache})
    job.done()
    job.elsewhere("third").but({"output.log_every": 3}).done()
    each, third = job.metrics(), job.elsewhere("third").metrics()
    assert [line["step"] for line in third] == [3, 6, 9, 10]
    for line, steps in zip(third, (each[0:3], each[3:6], each[6:9], each[9:]), strict=True):
        for key in ("tokens", "unique_tokens", "answer_tokens", "examples"):
            assert line[key] == sum(step[key] for step in steps)
        for key in ("loss", "rewards/margin", "rewards/accuracy", "logps/chosen"):
            mean = sum(step[key] * step["examples"] for step in steps) / line["examples"]
            assert line[key] == pytest.approx(mean, rel=1e-12, abs=1e-12)
        assert line["grad_norm"] == pytest.approx(sum(step["grad_norm"] for step in steps) / len(steps))
        assert line["lr"] == steps[-1]["lr"] and line["epoch"] == steps[-1]["epoch"]
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / (line["step_s"] * len(steps)))


def test_pack_size_and_prompt_sharing_change_nothing_but_rounding(job: Job) -> None:
    """G5: the same steps from one large pack, from many small ones, and with every prompt stored twice."""
    large = job.but({"pack.tokens": 2048})
    small = job.elsewhere("small").but({"pack.tokens": 256})
    apart = job.elsewhere("apart").but({"pack.share": "none", "reference.cache": job.folder / "cache-apart"})
    for each in (large, small, apart):
        each.done()
    for other in (small, apart):
        for a, b in zip(large.metrics(), other.metrics(), strict=True):
            for key in ("loss", "grad_norm", "rewards/margin", "logps/chosen"):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), (key, a["step"])
    assert apart.metrics()[0]["rewards/margin"] == 0.0
