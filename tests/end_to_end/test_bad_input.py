"""What a user can get wrong: exit status 2, a message that names what and where, no traceback, nothing half done."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tuningfork
from tests.end_to_end.workbench import Job, call, make_model, make_pairs, make_tokenizer, unequal, write_rows
from tests.tiny import with_form, with_row_logps
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.models import policy
from tuningfork.models.scorer import Scorer
from tuningfork.train import steps
from tuningfork.train.setup import model

ROOT = Path(tuningfork.__file__).parents[1]
PAIR = {"prompt": "bread", "chosen": "gladly", "rejected": "no"}


def with_rows(job: Job, *lines: Any, name: str = "rows.jsonl") -> Job:
    """The job on a file with these lines; text is written as it is."""
    path = job.folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return job.but({"data.train": path})


def with_model(job: Job, shelf: Path, change: Callable[[Path], None]) -> Job:
    """The job on a copy of the model folder, changed."""
    folder = job.folder / "changed-model"
    shutil.copytree(shelf / "model", folder)
    change(folder)
    return job.but({"model.path": folder})


# Settings


def command_line(*arguments: str) -> str:
    outcome = call(["train", *arguments])
    assert outcome.status == 2 and outcome.err.startswith("tuningfork: ") and "Traceback" not in outcome.err
    return outcome.err


def test_missing_recipe(tmp_path: Path) -> None:
    """The one that was probably meant is named."""
    (tmp_path / "recipe.yaml").write_text("train: {seed: 1}")
    message = command_line(str(tmp_path / "recipes.yaml"))
    assert "recipes.yaml: there is no such recipe" in message and f"Did you mean {tmp_path}/recipe.yaml?" in message


def test_no_settings_at_all() -> None:
    """Both required settings are named in one message."""
    message = command_line()
    assert "model.path" in message and "data.train" in message


@pytest.mark.parametrize(
    "command", ["train", "data", "eval", "reference", "launch train", "launch eval", "check-cluster"]
)
def test_no_command_passes_over_a_setting_that_there_is_not(command: str) -> None:
    outcome = call([*command.split(), "--data.max_lenth", "4"])
    assert outcome.status and "--data.max_lenth is not a setting; did you mean --data.max_length?" in outcome.err


def test_unknown_key_names_the_nearest(job: Job, tmp_path: Path) -> None:
    """In a recipe with its place, and as a flag."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.dump({"train": {"lerning_rate": 1e-6}}))
    assert f"{recipe}: train.lerning_rate is not a setting; did you mean train.learning_rate?" in command_line(
        str(recipe)
    )
    assert "did you mean --train.learning_rate?" in command_line("--train.learningrate", "1e-6")


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("objective.beta", -0.1, "greater than 0"),
        ("objective.name", "pdo", "dpo"),
        ("train.learning_rate", "fast", "a number"),
        ("train.learning_rate", "nan", "a number"),
        ("train.epochs", 0, "greater than 0"),
        ("train.examples_per_step", 0, "at least 1"),
        ("train.examples_per_step", 2.5, "a whole number"),
        ("data.max_length", 1, "at least 2"),
        ("objective.label_smoothing", 0.5, "less than 0.5"),
        ("objective.gamma", 1.0, "simpo"),
        ("pack.tokens", 100, "data.max_length"),
        ("output.dir", "", "output.dir"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(job: Job, key: str, value: Any, words: str) -> None:
    """Refused before anything is read or made."""
    message = job.but({key: value}).refused()
    assert key in message and words in message
    assert not job.run.exists()


def test_cuda_without_a_gpu(job: Job) -> None:
    """train.device cuda is refused with the way out."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = job.but({"train.device": "cuda"}).refused()
    assert "train.device" in message and "no GPU" in message


# Data


def test_missing_data_file(job: Job) -> None:
    """The path is named, with the nearest name beside it."""
    write_rows(job.folder / "pairs.jsonl", make_pairs(4))
    outcome = job.but({"data.train": job.folder / "pair.jsonl"})()
    message = outcome.err
    assert outcome.status == 2 and "reading pair.jsonl" not in outcome.out
    assert f"{job.folder}/pair.jsonl: no such file; did you mean {job.folder}/pairs.jsonl?" in message
    assert "data.eval" not in message


@pytest.mark.parametrize("bad", ['{"prompt": "a", "chosen": "b"', "prompt,chosen,rejected", '["a", "b", "c"]'])
def test_malformed_line_is_numbered(job: Job, bad: str) -> None:
    """Line 3 of 4 is broken, counted from 1, blank lines too."""
    message = with_rows(job, PAIR, "", bad, PAIR).refused()
    assert "rows.jsonl" in message and "line 3" in message


def test_rows_of_wrong_types_are_dropped_and_listed(job: Job) -> None:
    """Numbers, nulls and lists in place of text: each row with its number and what was found."""
    bad = [PAIR | {"chosen": 5}, PAIR | {"prompt": None}, PAIR | {"rejected": ["no"]}, {"prompt": "a", "chosen": "b"}]
    job = with_rows(job, *make_pairs(8), *bad)
    job.done()
    report = job.report()
    assert (report["rows_read"], report["used"]) == (12, 8) and sum(report["dropped"].values()) == 4
    assert [(row["row"], row["reason"]) for row in report["dropped_rows"]] == [
        (9, "wrong type"),
        (10, "null field"),
        (11, "wrong type"),
        (12, "missing field"),
    ]
    assert "is a number" in report["dropped_rows"][0]["detail"]


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", b""), ("a.jsonl", b"\n\n"), ("a.json", b"[]"), ("a.jsonl.gz", b"")]
)
def test_empty_file(job: Job, name: str, content: bytes) -> None:
    """A file without rows is named, zipped or not."""
    path = job.folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    message = job.but({"data.train": path}).refused()
    assert str(path) in message and ("empty" in message or "no rows" in message)


def test_all_rows_dropped(job: Job) -> None:
    """Each reason with its count and its first row."""
    message = with_rows(job, PAIR | {"chosen": ""}, PAIR | {"rejected": "gladly"}, PAIR | {"chosen": " "}).refused()
    assert "none of its 3 rows can be used" in message
    assert "2 x empty answer (first: row 1" in message and "1 x chosen equals rejected (first: row 2" in message


def test_fields_of_no_known_format(job: Job) -> None:
    """The fields found, the nearest format, and what to set, without a guess which answer is the better one."""
    message = with_rows(job, {"question": "a", "good": "b", "bad": "c"}).refused()
    assert "Nearest are question (question, chosen, rejected) lacks chosen and rejected;" in message
    assert message.rstrip().endswith(
        "such as data.columns: {bad: ..., good: ...}, with chosen and rejected for the dots."
    )


def test_names_that_a_terminal_would_obey(job: Job) -> None:
    """A message may quote a file's own names: control characters and half characters of them are shown, not sent."""
    message = with_rows(job, {"\x1b[2J\0": 1, "\ud800": 2, "\u202e": 3}).refused()
    assert "⟨U+001B⟩[2J⟨U+0000⟩, ⟨U+202E⟩, ⟨U+D800⟩" in message and message.encode()


def test_a_damaged_gzip(job: Job) -> None:
    """A download that was cut short."""
    path = job.folder / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(PAIR) + "\n").encode() * 500)[:60])
    assert f"{path}: the gzip data is cut short" in job.but({"data.train": path}).refused()


def test_sequences_longer_than_the_models_positions(job: Job) -> None:
    """max_length may exceed them, a sequence may not: the row is named, and the value to set."""
    long = {"prompt": "bread", "chosen": "river lamp " * 90, "rejected": "no"}
    job = with_rows(job, PAIR, long).but({"data.max_length": 1000, "pack.tokens": 2000})
    message = job.refused()
    assert "rows.jsonl:2 has" in message and "knows 256 positions" in message and "data.max_length to 256" in message


@pytest.mark.parametrize("key, wrong", [("data.train", "no-such.jsonl"), ("model.path", "no-such-model")])
def test_a_corrected_path_may_simply_be_run_again(job: Job, key: str, wrong: str) -> None:
    """A run that never began leaves no folder that refuses the mended command."""
    job.but({key: job.folder / wrong}).refused()
    job.done()


# Model and tokenizer


def test_model_path_that_does_not_exist(job: Job, shelf: Path) -> None:
    """The path and its nearest neighbour."""
    message = job.but({"model.path": shelf / "modell"}).refused()
    assert f"{shelf}/modell is not a folder. Did you mean {shelf}/model?" in message


def test_model_path_that_is_no_model(job: Job) -> None:
    """A folder without config.json."""
    assert "no config.json" in job.but({"model.path": job.folder}).refused()


def test_model_folder_without_weights(job: Job, shelf: Path) -> None:
    """The file names that were looked for."""
    message = with_model(job, shelf, lambda folder: (folder / "model.safetensors").unlink()).refused()
    assert "changed-model: no weights found" in message and "model.safetensors" in message


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(job: Job, shelf: Path, value: float) -> None:
    """One bad number: the tensor is named, before anything is trained."""

    def poison(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    message = with_model(job, shelf, change_weights(poison)).refused()
    assert "NaN or infinite weights in 1 tensors, first model.layers.1.mlp.up_proj.weight" in message


def test_weights_that_are_incomplete(job: Job, shelf: Path) -> None:
    """A missing tensor is never filled with random numbers."""
    lacking = change_weights(lambda weights: weights.pop("model.layers.0.self_attn.q_proj.weight"))
    message = with_model(job, shelf, lacking).refused()
    assert "lack 1 tensor " in message and "model.layers.0.self_attn.q_proj.weight" in message


def test_weights_that_are_cut_short(job: Job, shelf: Path) -> None:
    """A download that was cut short."""

    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])

    assert "changed-model" in with_model(job, shelf, cut).refused()


def test_weights_of_another_shape(job: Job, shelf: Path) -> None:
    """config.json and weights do not belong together."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(48)

    message = with_model(job, shelf, change_weights(change)).refused()
    assert "changed-model" in message and "model.norm.weight" in message


def test_tokenizer_without_chat_template(job: Job, shelf: Path) -> None:
    """Refused by template chat with the way out; template none works."""

    def strip(folder: Path) -> None:
        make_tokenizer(chat_template=None).save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)

    job = with_model(job, shelf, strip)
    message = job.refused()
    assert "no chat template" in message and "data.template: none" in message
    job.elsewhere("plain").but({"data.template": "none"}).done()


def test_tokenizer_of_another_model(job: Job, shelf: Path) -> None:
    """Ids beyond the embedding: the token, its id and the size are named."""

    def swap(folder: Path) -> None:
        make_tokenizer(vocab=320).save_pretrained(folder)

    message = with_model(job, shelf, swap).refused()
    assert "but the model embeds only the ids below 300" in message


def test_model_folder_without_tokenizer(job: Job, shelf: Path) -> None:
    """The folder is named."""

    def strip(folder: Path) -> None:
        for path in folder.glob("tokenizer*"):
            path.unlink()

    message = with_model(job, shelf, strip).refused()
    assert f"no tokenizer files in {job.folder}/changed-model (looked for tokenizer.json, " in message


# While training


def poisoned(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """From a step on, the first logit row's log-prob is NaN."""
    train_step, count = steps.train_step, iter(range(1, 1000))

    def poisoning(scorer: Any, *rest: Any, **named: Any) -> Any:
        if next(count) >= at_step:

            def row_logps(*args: Any) -> Any:
                logps, lse = plain_rows.row_logps(*args)
                logps[0] = torch.nan
                return logps, lse

            head = replace(scorer.head, kernels=with_row_logps(row_logps=row_logps))
            scorer = replace(scorer, head=head)
        return train_step(scorer, *rest, **named)

    monkeypatch.setattr(steps, "train_step", poisoning)


def test_a_loss_that_becomes_nan_names_step_and_example(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have not moved, the checkpoint before is whole, and the run can be continued to its right end."""
    job = job.but({"output.save_every": 1})
    with monkeypatch.context() as patch:
        poisoned(patch, at_step=5)
        message = job.refused()
    assert "step 5: the log-prob of answer 0 of" in message and "pairs.jsonl:" in message and "is nan." in message
    assert job.checkpoints() == ["step-3", "step-4"] and len(job.metrics()) == 4
    assert not (job.run / "model").exists()
    job.done("train", "--resume")
    job.elsewhere("unbroken").done()
    assert unequal(job.exported(), job.elsewhere("unbroken").exported()) == []


def test_a_learning_rate_that_explodes_is_noticed(job: Job) -> None:
    """No patch: weights of 1e30 give log-probs that are not finite in step 2."""
    job = job.but({"train.learning_rate": 1e30, "train.schedule": "constant", "train.warmup_ratio": 0})
    message = job.refused()
    assert "step 2: " in message and "pairs.jsonl:" in message and "learning_rate" in message
    assert not (job.run / "model").exists()


def test_weights_that_overflow_in_the_last_step_are_not_exported(job: Job) -> None:
    """A step may move finite weights to infinity; a run that ends with it must not end well."""
    job = job.but({"train.learning_rate": 3.4e38, "train.max_steps": 1, "train.weight_decay": 1.0})
    call(job.arguments("train"))
    assert not (job.run / "model").exists() or all(weight.isfinite().all() for weight in job.exported().values())


def allocate_too_much(*args: Any, **named: Any) -> Any:
    """As if a tensor did not fit: what torch itself then says, and does not say where."""
    return torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WORLD_SIZE", "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun has started several processes, which do not know where the first is"),
        ("PMI_SIZE", "mpirun has started several"),
        ("SLURM_STEP_NUM_TASKS", "srun has started several"),
    ],
)
def test_processes_that_cannot_find_each_other_are_refused(
    job: Job, shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """Each of them would train the whole run; one process is one, whoever starts it."""
    job = job.but({"data.eval": shelf / "held_out.jsonl"})
    monkeypatch.setenv("SLURM_NTASKS", "8")  # what was asked for; a batch script starts one process with it
    monkeypatch.setenv(name, "4")
    for command in (("train",), ("train", "--resume"), ("reference",), ("eval", "--policy", str(shelf / "model"))):
        message = job.refused(*command)
        assert f"{name} is 4" in message and words in message and "torchrun" in message
    assert not job.run.exists() and not job.cache.exists()
    monkeypatch.setenv(name, "1")
    job.but({"train.max_steps": 1}).done()


def test_a_run_with_a_broken_kernel_trains_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chose it, and on a CPU too, every command that scores refuses it; the plain ones take no time."""

    class Other(PlainAttention):
        factor = 1.0

        def attend(self, *args: Any, scale: float, **how: Any) -> torch.Tensor:
            return super().attend(*args, scale=scale * self.factor, **how)

    job = job.but({"train.max_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(policy, "select", lambda *_: with_form("attention", Other))
        assert ", kernel check " in job.done().out
        patch.setattr(Other, "factor", 1.5)
        other = job.elsewhere("other").but({"reference.cache": job.folder / "other-cache"})
        for command in ("train", "reference"):
            message = other.refused(command)
            assert f"{job.settings['model.path']}: attention kernel plain, call 1: outputs are" in message
        assert not other.run.exists() and not other.cache.exists()
    assert "kernel check" not in job.elsewhere("plain").done().out


def test_too_little_memory_for_a_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step, what torch said, the ways out; --resume with the one that changes no log-prob goes on."""
    job = job.but({"output.save_every": 1})
    train_step, count = steps.train_step, iter(range(1, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(
            steps, "train_step", lambda *a, **k: (allocate_too_much if next(count) == 3 else train_step)(*a, **k)
        )
        message = job.refused()
    assert "step 3, with packs of up to " in message and "1125899906842624 bytes" in message
    for key in ("pack.tokens", "objective.head_chunk_rows", "train.activation_memory"):
        assert key in message
    assert job.checkpoints() == ["step-1", "step-2"]
    job.but({"objective.head_chunk_rows": 64}).done("train", "--resume")


@pytest.mark.parametrize("command", ["reference", "train", "eval"])
def test_too_little_memory_for_scoring(job: Job, finished: Job, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Whatever is scored, by whichever command: the size of the pack is named."""
    job = job.but({"data.eval": finished.settings["data.eval"]})
    monkeypatch.setattr(Scorer, "score", patched_to_fail(Scorer.score))
    options = ["--policy", str(finished.run / "model")] if command == "eval" else []
    message = job.refused(command, *options)
    assert re.search(r"scoring a pack of \d+ tokens: ", message) and "pack.tokens" in message


def patched_to_fail(score: Callable[..., Any]) -> Callable[..., Any]:
    """`score` with a head that asks for more memory than there is."""

    def scoring(scorer: Scorer, batch: Any) -> Any:
        return score(replace(scorer, head=SimpleNamespace(score=allocate_too_much)), batch)

    return scoring


# The real command line


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    """`python -m tuningfork.cli`: status 2, one message on standard error, nothing on standard output, quickly."""
    command = [sys.executable, "-m", "tuningfork.cli", "train", "--objective.beta", "-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tuningfork: ") and "Traceback" not in done.stderr
    assert "objective.beta" in done.stderr


def test_a_run_in_a_process_of_its_own(job: Job) -> None:
    """From a recipe, with relative paths: status 0, the summary on standard output, nothing on standard error."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in job.settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = str(value) if isinstance(value, Path) else value
    tree["output"]["dir"], tree["reference"]["cache"] = "runs/mine", "cache"
    (job.folder / "recipe.yaml").write_text(yaml.dump(tree))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tuningfork.cli", "train", "recipe.yaml", "--train.max_steps", "2"]
    done = subprocess.run(command, cwd=job.folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert "exported model" in done.stdout and (job.folder / "runs" / "mine" / "model").is_dir()
    assert len(list((job.folder / "cache").glob("*/fingerprint.json"))) == 1


def test_make_model_is_what_it_says(tmp_path: Path) -> None:
    """The fixture itself: equal seeds give equal folders, so that "the same model elsewhere" means something."""
    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_what_an_optimizer_needs_is_asked_for_before_anything_is_read(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchao; only training needs it, so the reference can be scored all the same."""
    job = job.but({"train.optimizer": "adamw_8bit"})
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    message = job.refused()
    assert "train.optimizer is adamw_8bit, which needs torchao" in message and "pip install torchao" in message
    assert not job.run.exists() and not job.cache.exists()
    job.done("reference")


def test_a_budget_without_a_compiler_is_refused_before_anything_is_read(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "load", lambda *_: pytest.fail("read the weights"))
    message = job.but({"train.activation_memory": "budget:0.5"}).refused()
    assert "train.activation_memory is budget:0.5" in message and "model.compile" in message
