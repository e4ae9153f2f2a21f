"""SFT through the whole trainer: every kind of single answers, the chosen ones of pairs, and documents."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.workbench import Job, assert_same_state, make_pairs, make_tokenizer, write_rows

SFT = {"reference.cache": None, "objective.name": "sft"}


def said(*turns: str) -> list[dict[str, str]]:
    """Turns of user and assistant by turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


def answers(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in make_pairs(count, seed)]


@pytest.fixture
def sft(job: Job) -> Job:
    """Ten steps of four answers, with held-out ones."""
    write_rows(job.folder / "answers.jsonl", answers(40))
    write_rows(job.folder / "held_out.jsonl", answers(11, seed=5))
    return job.but(SFT).but({"data.train": job.folder / "answers.jsonl", "data.eval": job.folder / "held_out.jsonl"})


def plain_nll(job: Job, rows: list[dict[str, Any]], folder: Any) -> tuple[list[float], list[int]]:
    """Of each row the summed negative log-prob of its answer, and its tokens, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = make_tokenizer()
    sums, counts = [], []
    for row in rows:
        prompt = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        given = tokenizer(prompt).input_ids
        answer = tokenizer(f"{row['completion']}<|im_end|>").input_ids
        ids = torch.tensor([given + answer])
        logps = model(ids).logits[0].log_softmax(-1)
        sums.append(-float(logps[torch.arange(len(given) - 1, ids.shape[1] - 1), ids[0, len(given) :]].detach().sum()))
        counts.append(len(answer))
    return sums, counts


@pytest.mark.parametrize("mean_over", ["tokens", "examples"])
def test_held_out_loss_is_the_mean_of_plain_transformers_before_and_after(sft: Job, mean_over: str) -> None:
    """Over all held-out tokens, or over the examples; and training lowers it."""
    sft = sft.but({"objective.mean_over": mean_over, "pack.tokens": 128, "train.epochs": 2})
    out = sft.done().out
    assert "step-0" not in out and "reference" not in out and "held-out examples" in out
    scores = json.loads((sft.run / "eval.json").read_text())
    for when, folder in (("before", sft.settings["model.path"]), ("after", sft.run / "model")):
        sums, counts = plain_nll(sft, answers(11, seed=5), folder)
        over_tokens = sum(sums) / sum(counts)
        over_examples = sum(s / n for s, n in zip(sums, counts, strict=True)) / 11
        assert abs(over_tokens - over_examples) > 1e-3 * over_tokens
        loss = over_tokens if mean_over == "tokens" else over_examples
        assert scores[when]["loss"] == pytest.approx(loss, rel=1e-5)  # float32 against float64
        assert scores[when]["nll/token"] == pytest.approx(over_tokens, rel=1e-5)
        assert scores[when]["tokens/answer"] == pytest.approx(sum(counts) / 11)
        assert scores[when]["examples"] == 11
    assert scores["after"]["loss"] < scores["before"]["loss"] - 0.1
    lines = sft.metrics()
    assert lines[0]["nll/token"] == pytest.approx(math.log(300), rel=0.2) and lines[-1]["loss"] < lines[0]["loss"]
    evaluated = sft.done("eval").out
    [numbers] = (sft.run / "evaluations").glob("*.json")
    assert f"{scores['after']['loss']:.4g}"[:5] in evaluated
    assert json.loads(numbers.read_text())["scores"]["loss"] == pytest.approx(scores["after"]["loss"], rel=1e-6)


def test_a_line_of_several_steps_is_the_mean_over_their_tokens(sft: Job) -> None:
    twin = sft.elsewhere("twin").but({"output.log_every": 5})
    sft.done(), twin.done()
    often, seldom = sft.metrics(), twin.metrics()
    assert [len(often), len(seldom)] == [10, 2]
    for line, steps in zip(seldom, (often[:5], often[5:]), strict=True):
        tokens = [step["answer_tokens"] for step in steps]
        mean = sum(step["loss"] * n for step, n in zip(steps, tokens, strict=True)) / sum(tokens)
        assert line["loss"] == pytest.approx(mean, rel=1e-12) == pytest.approx(line["nll/token"], rel=1e-12)


def test_a_stopped_run_goes_on_and_the_best_step_is_kept(sft: Job) -> None:
    """Continued after six of ten steps, it is the run that never stopped, to the bit."""
    sft = sft.but({"train.eval_every": 3, "train.schedule": "constant", "output.export": "best"})
    whole = sft.elsewhere("whole")
    whole.done()
    sft.but({"train.max_steps": 6}).done()
    sft.but({"train.max_steps": 10}).done("train", "--resume")
    assert_same_state(sft, whole, 10)
    assert [line["step"] for line in whole.evaluations()] == [0, 3, 6, 9, 10]
    losses = {line["step"]: line["eval/loss"] for line in whole.evaluations()}
    assert json.loads((whole.run / "eval.json").read_text())["best"]["step"] == min(losses, key=lambda n: losses[n])


def test_every_kind_of_single_answers_and_the_chosen_ones_of_pairs_are_one_data_set(sft: Job) -> None:
    """The same conversations in eight formats give the same losses, to the bit."""
    rows = make_pairs(8)
    turns = [said(row["prompt"], row["chosen"]) for row in rows]
    talks = [[{"from": n, "value": t["content"]} for n, t in zip(("human", "gpt"), s, strict=True)] for s in turns]
    files = {
        "completion": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows],
        "chat": [{"prompt": one[:1], "completion": one[1:]} for one in turns],
        "messages": [{"messages": one} for one in turns],
        "sharegpt": [{"conversations": one} for one in talks],
        "alpaca": [{"instruction": row["prompt"], "input": "", "output": row["chosen"]} for row in rows],
        "pairs": rows,
        "whole": [{"chosen": one, "rejected": said(row["prompt"], row["rejected"])}
                  for one, row in zip(turns, rows, strict=True)],
        "ranking": [{"prompt": row["prompt"], "answers": [row["chosen"], row["rejected"]]} for row in rows],
    }  # fmt: skip
    losses = {}
    for name, some in files.items():
        best = {"data.answers": "best"} if name in ("pairs", "whole", "ranking") else {}
        path = write_rows(sft.folder / f"{name}.jsonl", some)
        job = sft.elsewhere(name).but({"data.train": path, "data.eval": None, "train.max_steps": 2, **best})
        job.done()
        losses[name] = [line["loss"] for line in job.metrics()]
    assert all(found == losses["completion"] for found in losses.values()), losses


def test_of_a_conversation_all_assistant_turns_count_or_the_last(sft: Job) -> None:
    talk = said("tell me about bread", "gladly bread", "and the river", "certainly river")
    path = write_rows(sft.folder / "talk.jsonl", [{"messages": talk}] * 2)
    counted = {}
    for train_on in ("all_assistant", "last"):
        job = sft.elsewhere(train_on).but({"data.train": path, "data.eval": None, "data.train_on": train_on})
        job.but({"train.examples_per_step": 2}).done()
        [line] = job.metrics()
        counted[train_on] = line["answer_tokens"] / 2
        assert line["tokens/answer"] == counted[train_on]
    tokenizer = make_tokenizer()
    lengths = [len(tokenizer(f"{text}<|im_end|>").input_ids) for text in ("gladly bread", "certainly river")]
    assert counted == {"all_assistant": sum(lengths), "last": lengths[1]}


def test_documents_are_trained_on_from_scratch(sft: Job) -> None:
    """Plain text without a prompt: each token but the first counts, the end token too."""
    texts = [f"{row['prompt']} {row['chosen']}" for row in make_pairs(40)]
    path = write_rows(sft.folder / "text.jsonl", [{"text": text} for text in texts])
    job = sft.but({"data.train": path, "data.eval": path, "data.template": "none", "train.epochs": 2})
    job.done()
    tokenizer = make_tokenizer()
    tokens = sum(len(tokenizer(text).input_ids) for text in texts)  # one less, and the end token
    lines = job.metrics()
    assert sum(line["answer_tokens"] for line in lines) == 2 * tokens
    assert lines[-1]["nll/token"] < lines[0]["nll/token"] - 0.1


def test_the_data_report_speaks_of_answers_and_not_of_pairs(sft: Job) -> None:
    outcome = sft.done("data", "--strict")
    report = json.loads((sft.run / "data" / "data_report.json").read_text())
    assert report["unit"] == "example" and set(report["train"]["lengths"]) == {"prompt", "answer", "sequence"}
    page = (sft.run / "data" / "data_report.html").read_text()
    for text in (outcome.out, re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.S)):
        assert "examples can be trained on" in " ".join(text.split())
        assert not [word for word in ("hosen", "ejected", "contradict each other", "of the pairs") if word in text]
