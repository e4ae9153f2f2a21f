"""Where `tuningfork eval` writes: a file for each evaluation in a folder of their own inside the run folder.

A file is named by what it evaluates and by a hash of all that decides its numbers, so that none is replaced by another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tuningfork.report.files import check_file, check_folder, write_json

FOLDER = "evaluations"  # inside output.dir; a run may begin where there is nothing else
MADE_BY = "tuningfork eval"  # stands at the beginning of each file
LONGEST = 80  # characters of a name before its hash
_MARK = f'{{\n  "made_by": "{MADE_BY}"'


def check_eval_folder(folder: Path) -> None:
    """Raise RunFolderError where no folder can be, before minutes are spent, or where there is a link."""
    check_folder(folder)


def write(
    folder: Path, said: str, facts: Mapping[str, Any], scores: Mapping[str, Any], more: Mapping[str, Any]
) -> Path:
    """Write an evaluation; returns its path. One of the same facts is replaced, for its numbers are the same.

    Args:
        said: what is evaluated, such as the model's and the data's name, for a person to find the file.
        facts: all that decides the numbers, as JSON has it.
        scores: the numbers.
        more: what else there is to know of them.

    Raises:
        RunFolderError: a file of that name is not such an evaluation, or the disk refuses.
    """
    digest = xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', said).strip('-.')[:LONGEST]}-{digest}.json"
    check_eval_folder(folder)  # it may have changed since
    check_file(path, MADE_BY, _MARK)
    write_json(path, {"made_by": MADE_BY, "scores": scores, **facts, **more})
    return path
