"""Where a run may begin or go on: in a folder that is its own, through no link, beside nothing foreign; and the
settings that it keeps there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import RunFolderError
from tuningfork.recipe.load import from_yaml
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.dataset import report_files
from tuningfork.report.sinks import NAMES
from tuningfork.train.run_folder import (
    CONFIG,
    FILES,
    FOLDERS,
    LOG,
    check_run_folder,
    check_settings,
    has_begun,
    read_config,
    to_go_on,
    with_checksum,
)

SETTINGS = with_checksum(RunConfig().to_yaml())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run leaves it, with its names only."""
    folder = tmp_path / "run"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in FILES:
        (folder / name).touch()
    return folder


def test_how_to_go_on_has_as_many_processes() -> None:
    folder = Path("run")
    assert to_go_on(folder) == "tuningfork train run/config.yaml --resume"
    assert to_go_on(folder, Ranks(0, 4, 0, 4)) == "tuningfork launch --processes 4 train run/config.yaml --resume"
    command = "tuningfork launch --nodes 2 --rendezvous HOST:PORT --processes 8 train run/config.yaml --resume"
    assert to_go_on(folder, Ranks(0, 16, 0, 8)) == command


def test_no_two_things_of_a_run_folder_have_one_name() -> None:
    """A sink's folder is named as its module is."""
    names = [*FILES, *FOLDERS, report_files.FOLDER]
    assert len(set(names)) == len(names) and set(NAMES) < set(FOLDERS)


def test_a_run_goes_on_where_all_is_its_own(run: Path, tmp_path: Path) -> None:
    check_run_folder(run, resume=True)
    (run / "notes").symlink_to(tmp_path)  # of the user, and no name of ours
    (tmp_path / "link").symlink_to(run)
    check_run_folder(tmp_path / "link", resume=True)
    with pytest.raises(RunFolderError, match="Add --resume"):
        check_run_folder(run, resume=False)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_a_name_of_ours_that_is_a_link_or_a_pipe_is_refused_before_anything_is_read(
    run: Path, name: str, kind: str
) -> None:
    path, elsewhere = run / name, run.parent / "elsewhere"
    path.rename(elsewhere)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(elsewhere if kind == "link" else "absent")
    with pytest.raises(RunFolderError, match=rf"{name} is a (link|named pipe).*(Remove it|Move it away)"):
        check_run_folder(run, resume=True)
    if name == CONFIG:  # also read for its day by commands that do not train
        assert has_begun(run)
        with pytest.raises(RunFolderError, match=r"config\.yaml is a (link|named pipe)"):
            read_config(run)


def test_a_log_with_a_second_name_is_refused(run: Path) -> None:
    (run.parent / "other").hardlink_to(run / LOG)
    with pytest.raises(RunFolderError, match=r"log\.txt is a file with 2 names"):
        check_run_folder(run, resume=True)


@pytest.mark.parametrize("name", ["notes.partial", "model.partial", ".step-1.partial"])
def test_a_strangers_partial_is_no_rest_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(RunFolderError, match="is no run folder"):
        check_run_folder(tmp_path, resume=False)
    (tmp_path / name).rename(tmp_path / f".config.yaml.tuningfork-{'0' * 16}.partial")
    check_run_folder(tmp_path, resume=False)


@pytest.mark.parametrize("name", ["stalls.txt", "stalls.3.txt"])
def test_a_start_that_stood_still_is_no_run_and_stands_in_the_way_of_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_run_folder(tmp_path, resume=False)
    with pytest.raises(RunFolderError, match="there is no run"):
        check_run_folder(tmp_path, resume=True)


def test_settings_with_a_checksum_are_the_same_settings(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    (tmp_path / CONFIG).write_text(SETTINGS)
    assert from_yaml(read_config(tmp_path) or "", CONFIG) == RunConfig()


def test_settings_that_were_spoilt_are_refused(tmp_path: Path) -> None:
    """Another learning rate is a learning rate, and a part of the settings is a recipe."""
    wholes = SETTINGS.encode()
    spoilt = [SETTINGS.replace("5.0e-07", "7.0e-07"), SETTINGS[: len(SETTINGS) // 2], SETTINGS + "\n", SETTINGS[:-1]]
    assert SETTINGS not in spoilt
    contents = [text.encode() for text in spoilt]
    for place in range(SETTINGS.index("checksum ") + 9, len(wholes), 7):
        contents.append(wholes[:place] + bytes([wholes[place] ^ 1]) + wholes[place + 1 :])
    for content in contents:
        (tmp_path / CONFIG).write_bytes(content)
        with pytest.raises(RunFolderError, match=r"config\.yaml is not as the run wrote it.* remove its first line"):
            read_config(tmp_path)


def test_what_was_changed_on_purpose_is_read_without_its_checksum(tmp_path: Path) -> None:
    text = SETTINGS.partition("\n")[2].replace("2048", "4096")
    (tmp_path / CONFIG).write_text(text)
    assert from_yaml(read_config(tmp_path) or "", CONFIG).data.max_length == 4096


def test_other_settings_are_named_with_the_command_that_repeats_them_all(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    changes: dict[str, tuple[object, object]] = {
        "train.seed": (3, 0),
        "objective.beta": (0.1, 0.3),
        "train.epochs": (1.0, 2.0),
        "output.save_every": (5, 100),
        "train.eval_every": (5, None),
    }
    with pytest.raises(RunFolderError) as caught:
        check_settings(folder, changes, RunConfig().values())
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [
        "  train.seed: the run has 3, now 0, the default",
        "  objective.beta: the run has 0.1, now 0.3",
    ]
    assert to_go_on(folder) == f"tuningfork train '{folder}/config.yaml' --resume"
    assert f"given again: {to_go_on(folder)} gives all that it has" in lines[3]
    assert "train.epochs and train.max_steps, if they are raised; output.*, train.device, " in lines[3]
    assert "train.eval_every" in lines[3]
