"""The head alone: forward and backward of hidden states [R, D] times output embedding [V, D], one JSON line a form.

    ours          models/head.py, through autograd, on a pack of random pairs; the loss is DPO's
    bf16_logits   the same with the logits rounded to the compute dtype, which costs less memory and digits
    plain         the same as ours with the plain row kernels, which every fast one is tested against
    liger         Liger's fused linear cross entropy under autocast, as trainers run it over float32 weights
    liger_cast    the same with the weights cast to bfloat16 once, gradients accumulated in float32
    torch_fused   torch.nn.functional.linear_cross_entropy in chunks (torch 2.13 or newer), weights cast once
    full_logits   the plain way: all logits at once in float32, torch's cross entropy of them, autograd

Weights are float32 and hidden states bfloat16 (float32 on a CPU), and both gradients are taken. The peers compute a
plain cross entropy: none of them has DPO's loss for a reference that is cached. Their products are the same.

    python -m bench.head
    python -m bench.head --forms ours bf16_logits --rows 16384 --chunk_rows 4096 8192 16384
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.output import device, emit, environment, failure, parser, peak, rounded, table
from bench.shapes import random_pairs
from bench.timing import free_memory, median_ms, transient_bytes
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import plain, select
from tuningfork.models.head import Head, _Projection
from tuningfork.objective.base import Answers
from tuningfork.objective.pairs import DPO
from tuningfork.records import LogitTransform, PackedBatch

# (hidden, weight, pack): loss and its backward pass, into .grad of both
Form = Callable[[Tensor, Tensor, PackedBatch], Tensor | None]  # ours: the log-probs of the answers too

PROMPT = 16  # tokens; prompts have no logit rows
PAIR_ROWS = 512  # logit rows of a pair on average; the yardstick's have 690

COLUMNS = {
    "form": "form",
    "rows": "R",
    "hidden": "D",
    "vocabulary": "V",
    "chunk_rows": "chunk",
    "ms": "ms",
    "tflops": "TFLOP/s",
    "peak_share": "of peak",
    "transient_gib": "transient GiB",
    "error_nats": "error, nats",
    "note": "note",
}


def pack_of(rows: int, vocabulary: int, seed: int = 0) -> PackedBatch:
    """One pack of random pairs with exactly `rows` logit rows, none of which two answers share."""
    rng = np.random.default_rng(seed)
    lengths, left = [], rows
    while left:
        size = left if left < 2 * PAIR_ROWS else int(rng.integers(PAIR_ROWS // 2, 3 * PAIR_ROWS // 2))
        chosen = int(rng.integers(max(1, size // 4), 3 * size // 4 + 1))
        lengths.append((PROMPT, chosen, size - chosen))
        left -= size
    examples = random_pairs(lengths, vocabulary, seed)
    pack = build_pack(examples, sum(example.plain_tokens for example in examples), "none")
    assert len(pack.logit_rows) == rows
    return pack


def forms(where: torch.device, chunk_rows: int) -> dict[str, Form | str]:
    """The forms by name; where one is missing, the reason."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    fast = select({"row_logps": {}}, where, dtype)
    found: dict[str, Form | str] = {
        "ours": partial(_ours, Head(fast, LogitTransform(), chunk_rows)),
        "bf16_logits": partial(_rounded, Head(fast, LogitTransform(), chunk_rows)),
        "plain": partial(_ours, Head(plain(), LogitTransform(), chunk_rows)),
    }
    if where.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        found |= {"liger": partial(_liger, cast=False), "liger_cast": partial(_liger, cast=True)}
    else:
        found["liger"] = "missing: liger-kernel, or a GPU"
    torch_fused = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    found["torch_fused"] = _torch_fused if torch_fused else f"missing in torch {torch.__version__}"
    found["full_logits"] = _full_logits
    return found


def _ours(head: Head, hidden: Tensor, weight: Tensor, pack: PackedBatch) -> Tensor:
    objective, reference = DPO(), np.zeros(len(pack.answer_lengths))
    answers = Answers.of(pack.examples, pack.answer_lengths, reference).to(hidden.device)
    return head.backward(hidden, weight, pack, objective.of_chunks(answers, objective.totals(pack.examples)))[1]


def _rounded(head: Head, hidden: Tensor, weight: Tensor, pack: PackedBatch) -> Tensor:
    def logits(projection: _Projection, rows: Tensor) -> Tensor:
        padded = F.pad(rows, (0, 0, 0, -len(rows) % 128))
        return (padded @ projection.padded.t())[: len(rows), : projection.vocabulary]

    with patch.object(_Projection, "logits", logits):
        return _ours(head, hidden, weight, pack)


def true_logps(hidden: Tensor, weight: Tensor, pack: PackedBatch, rows: int = 256) -> Tensor:
    """Answer log-probs of hidden states and weights in the compute dtype, all else in float64."""
    factor = weight.detach().to(hidden.dtype).double().t()
    parts = []
    for some, targets in zip(hidden.detach().split(rows), pack.targets.split(rows), strict=True):
        parts.append((some.double() @ factor).log_softmax(1).gather(1, targets[:, None])[:, 0])
    zeros = torch.zeros(len(pack.answer_lengths), dtype=torch.float64, device=hidden.device)
    return zeros.index_add(0, pack.answer_of_counted, torch.cat(parts)[pack.logit_row_of_counted])


def _liger(hidden: Tensor, weight: Tensor, pack: PackedBatch, *, cast: bool) -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
    # return_z_loss, accum_dtype
    rest = (pack.targets, None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
    if cast:
        LigerFusedLinearCrossEntropyFunction.apply(hidden, weight.to(hidden.dtype), *rest)[0].backward()
        return
    with torch.autocast(hidden.device.type, hidden.dtype):
        loss = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, *rest)[0]
    loss.backward()


def _torch_fused(hidden: Tensor, weight: Tensor, pack: PackedBatch) -> None:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    cast = weight.to(hidden.dtype)
    F.linear_cross_entropy(hidden, cast, pack.targets, reduction="sum", options=options).backward()  # type: ignore


def _full_logits(hidden: Tensor, weight: Tensor, pack: PackedBatch) -> None:
    logits = (hidden @ weight.to(hidden.dtype).t()).float()
    F.cross_entropy(logits, pack.targets, reduction="sum").backward()


def measure(
    form: Form, hidden: Tensor, weight: Tensor, pack: PackedBatch, true: Tensor, repeats: int, peak_flops: float | None
) -> dict[str, Any]:
    """One form on one set of inputs.

    ms             median milliseconds of forward and backward
    tflops         6·R·V·D / that time, in 1e12 per second; what a form computes again counts for nothing
    peak_share     of the card's dense bfloat16 peak
    transient_gib  the most memory held at once beyond the inputs and the float32 gradient of the weights; the gradient
                   of the hidden states is in it
    error_nats     the root mean square error of the answers' log-probs, 256 tokens each on average, to `true`; of forms
                   that tell them
    """

    def run() -> Tensor | None:
        hidden.grad = weight.grad = None
        return form(hidden, weight, pack)

    ms = median_ms(run, hidden.device, repeats)
    hidden.grad = weight.grad = None
    held = transient_bytes(run, hidden.device)
    logps = run()
    error = None if logps is None else float((logps - true).square().mean().sqrt())
    flops = 6 * hidden.numel() * len(weight)
    return {
        "ms": round(ms, 3),
        "tflops": round(flops / ms / 1e9, 1),
        "peak_share": None if peak_flops is None else round(flops / ms * 1e3 / peak_flops, 3),
        "transient_gib": rounded(None if held is None else (held - 4 * weight.numel()) / 2**30),
        "error_nats": None if error is None else float(f"{error:.2e}"),
    }


def compare(
    rows: int,
    hidden_size: int,
    vocabulary: int,
    chunk_rows: int,
    repeats: int,
    out: Path | None,
    wanted: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Every form, or those wanted, on the same inputs, one result line each. A form that fails says so in its line.

    Log-probs are those of a trained model: a target's logit is about 14, and its log-prob about -0.5.
    """
    where = device()
    pack = pack_of(rows, vocabulary).to(where)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    weight = (torch.randn(vocabulary, hidden_size, device=where) * hidden_size**-0.5).requires_grad_()
    hidden = 2 * torch.randn(rows, hidden_size, device=where) + 14 * weight.detach()[pack.targets]
    hidden = hidden.to(dtype).requires_grad_()
    true = true_logps(hidden, weight, pack)
    free_memory()
    about = {"bench": "head", "rows": rows, "hidden": hidden_size, "vocabulary": vocabulary, "chunk_rows": chunk_rows}
    lines = []
    for name, form in forms(where, chunk_rows).items():
        if wanted and name not in wanted:
            continue
        line: dict[str, Any] = {**about, "form": name, "note": form if isinstance(form, str) else ""}
        if not isinstance(form, str):
            try:
                line |= measure(form, hidden, weight, pack, true, repeats, peak())
            except Exception as error:  # a peer's failure, or its want of memory, is a result
                line["note"] = failure(error)
            free_memory()
        emit({**line, **environment("liger-kernel")}, out)
        lines.append(line)
    return lines


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[256] if small else [8192, 16384])
    options.add_argument("--hidden", type=int, nargs="+", default=[64] if small else [2048, 4096])
    options.add_argument("--vocabulary", type=int, nargs="+", default=[1000] if small else [100352, 151936])
    options.add_argument("--chunk_rows", type=int, nargs="+", default=[8192], help="objective.head_chunk_rows")
    options.add_argument("--forms", nargs="+", help="all unless given")
    options.add_argument("--repeats", type=int, default=3 if small else 10)
    args = options.parse_args(argv)
    lines = []
    for hidden in args.hidden:
        for vocabulary in args.vocabulary:
            for rows in args.rows:
                for chunk_rows in args.chunk_rows:
                    lines += compare(rows, hidden, vocabulary, chunk_rows, args.repeats, args.out, args.forms)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
