"""How results are written: one JSON line for each measurement, with what it was measured on, and plain tables."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tuningfork.report.run.throughput import peak_flops

# Bytes per second between a card and its memory, from the same data sheets as tuningfork.report.run.throughput's peaks;
# cards whose name leaves open which memory they have are left out. Tried in order, the first match counts.
PEAK_BYTES = {
    r"\bH200\b": 4.8e12,  # SXM and NVL
    r"\bH100 NVL\b": 3.9e12,
    r"\bH100 PCIe\b": 2.0e12,
    r"\bH100\b": 3.35e12,
    r"\bA100-SXM4-80GB\b": 2.039e12,
    r"\bA100-SXM4-40GB\b": 1.555e12,
    r"\bL40S\b": 0.864e12,
    r"\bL4\b": 0.3e12,
    r"\bA10\b": 0.6e12,
}


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment(*packages: str) -> dict[str, Any]:
    """What a number was measured on: card, driver, versions (of `packages` too), command line. None: not there.

    The card is asked of its driver, so a program that only starts others stays off it.
    """
    name, driver = _card()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else name,
        "driver": driver,
        "torch": torch.__version__,
        **{package: _version(package) for package in ("triton", "transformers", *packages)},
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def peak() -> float | None:
    """Dense bfloat16 peak of this card, flops per second; None where it is not known, as for every CPU."""
    return peak_flops(environment()["device"], "bfloat16")


def peak_bytes(name: str | None = None) -> float | None:
    """Bytes per second between this card, or one of that name, and its memory; None where it is not known, as for every
    CPU and every slice of a card."""
    name = environment()["device"] if name is None else name
    if "MIG" in name:
        return None
    return next((peak for pattern, peak in PEAK_BYTES.items() if re.search(pattern, name)), None)


def emit(line: Mapping[str, Any], out: Path | None = None) -> None:
    """Print a result as one JSON line, and append it to the file `out`."""
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as aligned text. `columns`: key -> heading, in order; "-" stands for None and for what a row lacks."""
    cells = [list(columns.values()), *([_cell(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    numeric = [all(not isinstance(row.get(key), str) for row in rows) for key in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def failure(error: BaseException) -> str:
    """An exception in one short line."""
    return f"failed: {type(error).__name__}: {str(error).strip()[:160]}".replace("\n", " ")


def parser(
    description: str | None, out: str = "a file that the JSON lines are appended to", required: bool = False
) -> argparse.ArgumentParser:
    """A parser with the option that every program has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=required, help=out)
    return made


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


@cache
def _card() -> tuple[str, str | None]:
    """Name and driver of the first GPU."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip():
            name, _, driver = answer.stdout.splitlines()[0].rpartition(", ")
            return name, driver
    return "cpu", None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
