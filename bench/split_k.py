"""Layers' products whose rows have other bits among other numbers of rows, with and without split-K; JSON lines.

A line is one product, rows [M, inputs] · weight [outputs, inputs]ᵀ, in one setting:

    split-K     as PyTorch has the library work by default
    without     as passes of a policy run: see tuningfork/models/split_k.py
    no room     in a process that gives the library no workspace, which float32 takes (--dtype float32 --forgo)

    form        product, or with bias
    tried       numbers of rows, every 128th from 1,024 to --rows
    other       of them, those in which some row has other bits than among --rows
    largest     the largest of these
    ms          milliseconds among --rows, launch included

The table has one line for each setting and form: how many shapes vary, and how long all take together.

    python -m bench.split_k
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.output import device, emit, environment, parser, table
from bench.timing import free_memory, median_ms
from tuningfork.models.split_k import choose_library, without_split_k
from tuningfork.train.setup.device import DTYPES

FEWEST, STEP = 1024, 128
# Inputs and outputs. First those of gates, decays, adapters and keys of few heads; then a block's matrices.
NARROW = [
    (inputs, outputs)
    for inputs in (768, 1024, 2048, 2560, 3840, 4096, 8192)
    for outputs in (8, 12, 16, 24, 30, 32, 36, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768)
]
WIDE = [
    *((512, 512), (512, 2048), (768, 2048), (768, 3072), (896, 896), (896, 4864), (1024, 2048)),
    *((1024, 3072), (1536, 1536), (1536, 8960), (2048, 1024), (2048, 2048), (2048, 6144), (2048, 8192)),
    *((3072, 768), (3072, 1024), (3584, 3584), (3584, 18944), (3840, 2880), (3840, 3840), (3840, 5760), (3840, 11008)),
    *((4096, 1024), (4096, 4096), (4096, 11008), (4096, 14336), (4864, 896), (5120, 5120), (5760, 3840), (8192, 2048)),
    *((8960, 1536), (11008, 3840), (11008, 4096), (14336, 4096), (18944, 3584)),
]
COLUMNS = {"setting": "setting", "form": "form", "shapes": "shapes", "vary": "vary", "ms": "ms of all"}


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.mT if bias is None else linear(rows, weight, bias)


def measure(shape: tuple[int, int], dtype: torch.dtype, biased: bool, most: int, without: bool) -> dict[str, Any]:
    """The numbers of one line."""
    (inputs, outputs), where = shape, device()
    torch.manual_seed(0)
    rows, weight = (torch.randn(n, inputs, device=where, dtype=dtype) for n in (most, outputs))
    bias = torch.randn(outputs, device=where, dtype=dtype) if biased else None
    counts = range(FEWEST, most, STEP)

    with without_split_k(where, dtype) if without else nullcontext():
        whole = product(rows, weight, bias)
        other = [count for count in counts if not torch.equal(product(rows[:count], weight, bias), whole[:count])]
        ms = median_ms(lambda: product(rows, weight, bias), where, repeats=10, warmup=3)
    found = {"tried": len(counts), "other": len(other), "largest": other[-1] if other else None}
    return {**found, "ms": round(ms, 4)}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--dtype", choices=list(DTYPES), default="float32" if small else "bfloat16")
    options.add_argument("--rows", type=int, default=1280 if small else 16384)
    options.add_argument("--forgo", action="store_true", help="give the library no workspace; for float32")
    options.add_argument("--shapes", nargs="+", help="inputs x outputs; many unless given",
                         default=["64x30"] if small else [f"{n}x{m}" for n, m in NARROW + WIDE])  # fmt: skip
    args = options.parse_args(argv)
    if args.forgo:
        choose_library(device(), torch.float32, exact=True)
    settings = ["no room"] if args.forgo else ["split-K", *(["without"] if args.dtype != "float32" else [])]

    lines: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for shape in args.shapes:
        inputs, outputs = map(int, shape.split("x"))
        for setting in settings:
            for form in ("product", "with bias"):
                about = {"setting": setting, "dtype": args.dtype, "inputs": inputs, "outputs": outputs, "form": form}
                numbers = measure(
                    (inputs, outputs), DTYPES[args.dtype], form == "with bias", args.rows, setting == "without"
                )
                emit({"bench": "split_k", **about, **numbers, **environment()}, args.out)
                lines[setting, form].append(numbers)
                free_memory()
    sums = []
    for (setting, form), some in lines.items():
        vary, ms = sum(line["other"] > 0 for line in some), round(sum(line["ms"] for line in some), 2)
        sums.append({"setting": setting, "form": form, "shapes": len(some), "vary": vary, "ms": ms})
    print(table(sums, COLUMNS))


if __name__ == "__main__":
    main()
