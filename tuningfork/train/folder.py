"""The run folder: made once, continued only when asked, never overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tuningfork.errors import RunFolderError
from tuningfork.report.writer import write_text

# Settings that may change between a run and its continuation: they decide where and how often, not what.
FREE_TO_CHANGE = ("output.", "train.device", "reference.cache", "objective.head_chunk_rows", "model.path")


def enter(
    folder: Path,
    resume: bool,
    config_text: str,
    changed_since: Callable[[str], dict[str, tuple[object, object]]],
) -> None:
    """Make the run folder with its config.yaml, or enter an existing one to continue it.

    Args:
        config_text: the resolved config.
        changed_since: given the text of the folder's config.yaml, the settings that differ now.

    Raises:
        RunFolderError: the folder exists and `resume` is not given, or it holds another run.
    """
    path = folder / "config.yaml"
    if folder.exists() and not resume and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists. Add --resume to continue that run, or choose another output.dir.")
    if path.exists():
        changed = {
            key: values for key, values in changed_since(path.read_text()).items() if not key.startswith(FREE_TO_CHANGE)
        }
        if changed:
            lines = [f"  {key}: the run has {old!r}, now {new!r}" for key, (old, new) in changed.items()]
            raise RunFolderError(
                f"{folder} is a run with other settings:\n" + "\n".join(lines) + "\n"
                "A continued run must have the same. Set them back, or choose another output.dir."
            )
    elif folder.is_dir() and any(entry.name != "config.yaml.partial" for entry in folder.iterdir()):
        raise RunFolderError(f"{folder} is no run folder: it has files, but no config.yaml. Choose another output.dir.")
    write_text(path, config_text)
