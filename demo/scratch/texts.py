"""Text to learn that every machine has: the modules of Python's standard library, a row of text each.

    python demo/scratch/texts.py runs/scratch        # writes train.jsonl and held_out.jsonl there

Every 20th file in the order of their names is held out. Nothing is fetched; the text is the Python Software
Foundation's, and stays where it is written.
"""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT = 20  # of so many files, one
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def modules() -> Iterator[tuple[str, str]]:
    """The name and the text of each module that is UTF-8, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield name.as_posix(), text


def write(folder: Path, held_out_most: int | None = None) -> tuple[Path, Path]:
    """Rows to train on and held-out ones, as files of these names in a folder.

    `held_out_most`: characters of each held-out row, from its beginning, if not all.
    """
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    texts = [text for _, text in modules()]
    folder.mkdir(parents=True, exist_ok=True)
    held_out.write_text(_rows(text[:held_out_most] for text in texts[::HELD_OUT]), encoding="utf-8")
    del texts[::HELD_OUT]
    train.write_text(_rows(texts), encoding="utf-8")
    return train, held_out


def _rows(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def gzip_bits_a_byte(rows: Path) -> float:
    """What `gzip -9` takes of the texts of a file, one behind the other, bits for each of their bytes."""
    lines = rows.read_text(encoding="utf-8").splitlines()
    texts = "".join(json.loads(line)["text"] for line in lines).encode()
    return 8 * len(gzip.compress(texts, 9)) / len(texts)


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        print(written)
