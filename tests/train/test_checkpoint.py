"""Checkpoints that are not what was written, and those that cannot be read."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tuningfork import files
from tuningfork.errors import RunFolderError
from tuningfork.files import checksum
from tuningfork.report.run.metrics import Evaluation, Means
from tuningfork.train.checkpoint import Progress, newest, progress, restore, save
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, move_weights, set_learning_rate

_BEFORE = Evaluation(2, "pairs", 0.1, Means({"rewards/chosen": 0.5}, {"rewards/chosen": 2}))
PROGRESS = Progress(3, 12, "data", "model", "float32", "none", "held out", _BEFORE)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, PROGRESS, *parts(), keep_last=2)


def test_an_intact_checkpoint_is_restored(saved):
    assert restore(saved, *parts()) == PROGRESS


def test_8_bit_moments_and_bfloat16_weights_go_on_to_the_bit(tmp_path, uncompiled):
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(64, 128).bfloat16()
        return model, build_optimizer(model, TrainConfig(optimizer="adamw_8bit", learning_rate=1e-3))

    def move(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        torch.manual_seed(number)  # as the training loop does: rounding is stochastic
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        set_learning_rate(optimizer, 1e-3 / (1 + number))
        move_weights(optimizer)

    whole = fresh()
    for number in range(4):
        move(*whole, number)
        if number == 1:
            save(tmp_path, PROGRESS, *whole, keep_last=2)
    cut = fresh()
    restore(tmp_path / "step-3", *cut)
    for number in (2, 3):
        move(*cut, number)
    assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), cut[0].parameters(), strict=True))


def test_the_recipe_alone_decides_how_a_run_moves_on(tmp_path):
    """A checkpoint has weights and moments, and none of the optimizer's settings."""
    model, optimizer = parts()
    group = optimizer.param_groups[0]
    ours = {key: value for key, value in group.items() if key != "params"}
    group.update(weight_decay=-1.0, eps=-1.0, betas=(0.0, 0.0), maximize=True, lr=7.0)
    path = save(tmp_path, PROGRESS, model, optimizer, keep_last=2)
    model, optimizer = parts()
    restore(path, model, optimizer)
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == ours


def test_a_random_generator_that_is_none_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.full((5056,), 255, dtype=torch.uint8))
    path = save(tmp_path, PROGRESS, *parts(), keep_last=2)
    with pytest.raises(RunFolderError, match=r"step-3 cannot be loaded \(.*\)\. Remove that folder"):
        restore(path, *parts())


@pytest.mark.parametrize(("old", "new"), [('"dtype"', '"kind"'), ('"step"', '"date": "2026-01-31", "step"')])
def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path, old, new):
    """Nobody is told to remove it."""
    path = save(tmp_path, PROGRESS, *parts(), keep_last=2)
    (path / "progress.json").write_text((path / "progress.json").read_text().replace(old, new))
    with pytest.raises(
        RunFolderError, match=r"another version of tuningfork \(progress.json differs in (date|dtype, kind)"
    ):
        progress(path)


def test_a_flipped_bit_is_noticed_before_anything_is_loaded(saved):
    """What a run looks at first: where it stands, and with which activations it goes on."""
    whole = (saved / "progress.json").read_text()
    for old, new in (('"none"', '"nond"'), ('"step": 3', '"step": 7'), ("0.1", "0.3")):
        (saved / "progress.json").write_text(whole.replace(old, new))
        with pytest.raises(RunFolderError, match=r"progress\.json is damaged.*Remove that folder"):
            progress(saved)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"step": 3', '"step": "3"', "progress.json: step: Input should be a valid integer"),
        ('"step": 3', '"step": NaN', "cannot be loaded"),
        ('"before": {', '"before": [{', "cannot be loaded"),
        ('"before": {', '"before": [1], "more": {', "another version"),
        ('"before": {', '"before": ' + "[" * 100_000, "cannot be loaded"),
        ('"none"', "7", "progress.json: activation_memory: Input should be a valid string"),
        ('"none"', '"most"', "progress.json: activation_memory: String should match"),
        ('"none"', '"auto"', "progress.json: activation_memory: auto"),
        ('"step": 3', '"step": 4', "progress.json: step: it is 4"),
        ('"step": 3', '"step": 0', "progress.json: step: Input should be greater"),
        ('"examples": 12', '"examples": -1', "progress.json: examples: Input should be greater"),
        ('"loss": 0.1', '"loss": "low"', "progress.json: before.loss: Input should be a valid number"),
        ('"loss": 0.1', '"loss": 1e999', "cannot be loaded"),
        (
            '"rewards/chosen": 0.5',
            '"rewards/chosen": []',
            "progress.json: before.means.sums.rewards/chosen: Input should",
        ),
        ('"rewards/chosen": 2', '"rewards/chosen": 2.5', "progress.json: before.means.counts.rewards/chosen: Input"),
        ('"counts": {"rewards/chosen": 2}', '"counts": {}', "before.means: counts other statistics than it sums"),
        ('"counts"', '"more": 1, "counts"', "is not as it was written"),
        ('"loss": 0.1', '"losses": 0.1', "differs in before.loss, before.losses"),
    ],
)
def test_a_checkpoint_that_was_made_up_is_refused_in_words(saved, old, new, said):
    path = saved / "progress.json"
    path.write_text(path.read_text().replace(old, new))
    sealed = json.loads((saved / "digests.json").read_text())
    (saved / "digests.json").write_text(json.dumps(sealed | {"progress.json": checksum(path)}))
    for look in (progress, lambda path: restore(path, *parts())):
        with pytest.raises(RunFolderError, match=said):
            look(saved)


@pytest.mark.parametrize("content", [b"", b"[]", b"\0", b"\xff{}", b"{", b"{}"])
def test_progress_that_is_none(saved, content):
    (saved / "progress.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=rf"{saved} (cannot be loaded|was written by another version)"):
        progress(saved)


def names() -> list[str]:
    return ["__0_0.distcp", ".metadata", "progress.json", "digests.json"]


@pytest.mark.parametrize("name", names())
def test_one_flipped_bit_is_noticed(saved, name):
    """dcp has no checksum: most bits of a weight, flipped, give another weight."""
    assert {file.name for file in saved.iterdir()} == set(names())
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(RunFolderError, match="cannot be loaded") as caught:
        restore(saved, *parts())
    message = str(caught.value)
    assert str(saved) in message and "Remove that folder" in message
    assert name == "digests.json" or f"({name} is damaged" in message


def test_a_checkpoint_is_not_read_to_be_hashed(tmp_path, monkeypatch):
    """What is sealed is what was handed to the disk; reading it back takes as long as writing it."""
    read: list[str] = []
    monkeypatch.setattr(files, "checksum", lambda file: (read.append(file.name), checksum(file))[1])
    path = save(tmp_path, PROGRESS, *parts(), keep_last=2)
    assert read == ["progress.json"]
    sealed = json.loads((path / "digests.json").read_text())
    assert sealed == {name: checksum(path / name) for name in names() if name != "digests.json"}


@pytest.mark.parametrize("name", names())
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(RunFolderError, match=f"{saved} cannot be loaded .*{name}"):
        restore(saved, *parts())


def test_an_error_without_a_word_is_named_by_its_type(saved, monkeypatch):
    def failing(*args, **kwargs):
        raise EOFError

    monkeypatch.setattr(dcp.DefaultLoadPlanner, "create_local_plan", failing)
    with pytest.raises(RunFolderError, match=r"cannot be loaded \(EOFError\)"):
        restore(saved, *parts())


def test_only_what_was_saved_is_removed_for_newer_ones(tmp_path):
    """A folder that looks like a checkpoint may be somebody's own, or hold what somebody put into it."""
    for step_done in (1, 2, 3):
        save(tmp_path, replace(PROGRESS, step=step_done), *parts(), keep_last=9)
    (tmp_path / "step-2" / "notes.txt").write_text("the best one so far")
    strange = ["step-10", "step-0", "step-05", "step-x", "step-4\n", "step-\u0663", "step-1.partial", "notes"]
    for name in strange:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    save(tmp_path, replace(PROGRESS, step=11), *parts(), keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-11", *strange}
    assert newest(tmp_path) == tmp_path / "step-11"
    assert all((tmp_path / name / "precious").exists() for name in strange)


def test_what_a_kill_left_of_a_checkpoint_is_cleared_away_and_nothing_else(tmp_path, saved):
    ours, others = tmp_path / f".step-9.tuningfork-{'0' * 16}.partial", tmp_path / "step-9.partial"
    for folder in (ours, others):
        folder.mkdir()
        (folder / "__0_0.distcp").touch()
    assert newest(tmp_path) == saved
    assert others.exists() and not ours.exists()


@pytest.mark.parametrize("kind", ["link", "link to nothing", "file"])
def test_what_bears_a_checkpoints_name_and_is_no_folder_is_refused(tmp_path, saved, kind):
    saved.rename(tmp_path / "elsewhere")
    saved.touch() if kind == "file" else saved.symlink_to("elsewhere" if kind == "link" else "absent")
    with pytest.raises(RunFolderError, match=r"step-3 is a (link|file).*(Remove it|Move it away)"):
        newest(tmp_path)
    assert os.path.lexists(saved) and (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_checkpoints_file_that_is_none_is_refused(saved, name, kind):
    path = saved / name
    path.rename(saved.parent / name)
    path.symlink_to(saved.parent / name) if kind == "link" else os.mkfifo(path)
    with pytest.raises(RunFolderError, match=rf"{name} is a (link|named pipe)"):
        restore(saved, *parts())
    if name == "progress.json":
        with pytest.raises(RunFolderError, match=rf"{name} is a (link|named pipe)"):
            progress(saved)
