"""Checkpoints that are not what was written, and those that cannot be read."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tuningfork import files
from tuningfork.errors import RunFolderError
from tuningfork.files import checksum
from tuningfork.train.checkpoint import Progress, progress, restore, save
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, set_learning_rate, step

PROGRESS = Progress(3, 12, "data", "model", "float32", "none", "held out", {"pairs": 2, "loss": 0.1})


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
        torch.manual_seed(number)  # as the training loop does: rounding is by chance
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        set_learning_rate(optimizer, 1e-3 / (1 + number))
        step(optimizer)

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


@pytest.mark.parametrize(("old", "new"), [('"dtype"', '"kind"'), ('"step"', '"date": "2026-01-31", "step"')])
def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path, old, new):
    """Nobody is told to remove it."""
    path = save(tmp_path, PROGRESS, *parts(), keep_last=2)
    (path / "progress.json").write_text((path / "progress.json").read_text().replace(old, new))
    with pytest.raises(
        RunFolderError, match=r"another version of tuningfork \(progress.json differs in (date|dtype, kind)"
    ):
        progress(path)


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
