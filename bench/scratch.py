"""Models from nothing beside what two public reports say of theirs, claim by claim; JSON lines, then one table.

The reports: N, of a trainer for native sparse attention (nsa-vibe); H, of one for CCGQA (HYDRA). A line's `row` is the
report and the number of a claim of it, `report` what it says, on hardware of its own, `ours` what was measured here,
and `target` what we ask of ourselves, if anything. docs/from_scratch.md says which of the claims compare.

    lengths       tokens/s at each length with as many tokens a step, its dense twin beside, and their spread
    start         seconds of each phase of a start without weights
    activations   memory and speed of each way to keep activations, and whether gradients have the same bits
    head          the head beside full logits: memory, speed, and errors to float64
    elementwise   norms, SwiGLU and rotation in the widths of these models: eager and compiled
    layer         one CCGQA layer beside multi-head attention
    moments       moments in 8 bits: bytes a weight, and the loss behind as many steps
    tf32          float32 runs with and without TF32 products
    compile       steps with blocks eager, as ours, and with the whole model compiled by max-autotune
    graphs        one pack's forward and backward pass replayed as a CUDA graph: speed, bits, or what cannot be captured

Models are those of recipes/scratch, by name, of random ids. On a CPU sizes are small, to see that it works, and what a
CPU cannot tell says so in its note. Rows of which a call has no number stand behind its table, each with what stands
for it instead: a test, another command, raw lines, an entry of docs/log.md. So every call prints each row.

    python -m bench.scratch --lengths 512 1024 2048 4096 8192 32768
    python -m bench.scratch --parts start --models hydra-100m
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import ccgqa, elementwise, head, nothing, scratch_forms, scratch_runs
from bench.output import device, emit, environment, failure, parser, table
from bench.scratch_claims import CLAIMS, NO_CLAIM, RATES, SPREAD_MOST, line, unmeasured
from bench.scratch_runs import begin
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import select
from tuningfork.models.head import Head
from tuningfork.objective.base import Answers
from tuningfork.objective.lm import LM
from tuningfork.records import LogitTransform
from tuningfork.train.setup.device import tf32_products

NEEDS_GPU = "needs a GPU"
SPREAD_OVER = (512, 8192)  # lengths between which the slowest and the fastest are compared

COLUMNS = {name: name for name in ("row", "what", "model", "at", "ours", "unit", "report", "target", "note")}


@dataclass(frozen=True)
class Options:
    """What is measured, and how long."""

    models: list[str]
    lengths: list[int]
    tokens: int
    steps: int
    learning_steps: int
    repeats: int
    limit: int
    out: Path | None

    @property
    def length(self) -> int:
        """That of what is measured at one length."""
        return min(self.tokens, self.lengths[0])


def lengths(options: Options) -> Iterator[dict[str, Any]]:
    """Tokens/s, and how far they are apart over the lengths; this model's over its dense twin's."""
    for name in options.models:
        beside = nothing.twin(name)
        rates: dict[str, dict[int, float]] = {}
        for model in (name, beside) if beside else (name,):
            for found in _rates(model, options):
                yield found
                if found["ours"] is not None:
                    rates.setdefault(model, {})[found["at"]] = found["ours"]
            known = rates.get(model, {})
            yield line(CLAIMS["spread"], "max/min of tokens/s", model, _spread(known), note=falls(known))
        for length in sorted(rates.get(name, {}).keys() & rates.get(beside or "", {}).keys()):
            ratio = round(rates[name][length] / rates[beside or ""][length], 3)
            yield line(CLAIMS["twin"], "tokens/s over the dense twin's", name, ratio, at=length)


def _rates(model: str, options: Options) -> Iterator[dict[str, Any]]:
    """Tokens/s at each length."""
    claim, most = RATES.get(model, NO_CLAIM), max(options.lengths)
    tokens = max(options.tokens, most)
    work = begin(model, tokens, most)
    for length in options.lengths:
        try:
            found = scratch_runs.tokens_per_second(work.steps(length, options.steps))
        except Exception as error:  # a length that does not fit is a result
            yield line(claim, "tokens/s", model, None, at=length, note=failure(error))
            continue
        yield line(claim, "tokens/s", model, found["tokens_s"], at=length, tokens_per_step=tokens, **found)


def _spread(rates: dict[int, float]) -> float | None:
    """Most over least tokens/s of the lengths from 512 to 8,192, or of all where fewer than two are."""
    among = [rate for length, rate in rates.items() if SPREAD_OVER[0] <= length <= SPREAD_OVER[1]]
    among = among if len(among) > 1 else list(rates.values())
    return round(max(among) / min(among), 3) if among else None


def falls(rates: dict[int, float]) -> str:
    """From which length on tokens/s are below the most of shorter ones by more than the target permits, and how the
    time of a token grows to the longest: as S^0 where all work is linear, towards S^1 where some is quadratic. Empty
    where they do not fall up to the longest."""
    lengths = sorted(rates)
    if not lengths or rates[lengths[-1]] * SPREAD_MOST >= max(rates.values()):
        return ""
    fastest = max(lengths, key=lambda length: rates[length])
    first = next(n for n in lengths if n > fastest and rates[n] * SPREAD_MOST < rates[fastest])
    before, last = lengths[lengths.index(first) - 1], lengths[-1]
    power = math.log(rates[before] / rates[last]) / math.log(last / before)
    return (
        f"tokens/s fall with the length from {first:,} on: {rates[first]:,.0f} there, {rates[fastest]:,.0f} at "
        f"{fastest:,}; from {before:,} to {last:,} a token's time grows as S^{power:.2f}"
    )


def start(options: Options) -> Iterator[dict[str, Any]]:
    """Seconds from nothing to a trained step."""
    for name in options.models:
        for phase, seconds in scratch_runs.phases(name, options.tokens, options.length).items():
            claim = CLAIMS.get(phase.removesuffix("_s"), CLAIMS["start"])
            yield line(claim, phase, name, seconds, at=options.length)


def activations(options: Options) -> Iterator[dict[str, Any]]:
    """Memory, speed and bits of each mode."""
    compiled = device().type == "cuda"
    modes = ["none", *(["budget:0.5"] if compiled else []), "block"]
    for name in options.models:
        for found in scratch_runs.activations(name, options.tokens, options.length, options.steps, modes):
            of_mode, share = f"activations {found['mode']}", found["of_none"]
            told = {"at": options.length, "activation_gib": found["activation_gib"]}
            memory = None if share is None else round(share, 4)
            note = "" if compiled else NEEDS_GPU
            yield line(CLAIMS["memory"], f"{of_mode}: memory", name, memory, **told, note=note)
            yield line(CLAIMS["speed"], f"{of_mode}: speed", name, found["speed"], **told)
            yield line(CLAIMS["bits"], f"{of_mode}: gradients equal to the bit", name, found["equal_gradients"], **told)


def full_logits(options: Options) -> Iterator[dict[str, Any]]:
    """The head against full logits: errors in float32, and memory and time of both."""
    small = device().type == "cpu"
    rows = 256 if small else 16384
    for name in options.models:
        config = nothing.config(name)
        width, vocabulary = config.hidden_size, config.vocab_size
        for what, (error, theirs) in head_errors(min(rows, 2048), width, vocabulary).items():
            claim = CLAIMS["loss error" if what == "loss" else "gradient error"]
            note = f"full logits in float32: {theirs:.2e}"
            yield line(claim, f"head's error: {what}", name, error, at=min(rows, 2048), note=note)
        wanted = ["ours", "torch_fused", "full_logits"]
        lines = head.compare(rows, width, vocabulary, 4096, options.repeats, options.out, wanted)
        forms = {found["form"]: found for found in lines}
        ours, full = forms["ours"], forms["full_logits"]
        measured = not small and "ms" in ours and "ms" in full
        memory = round(full["transient_gib"] / ours["transient_gib"], 2) if measured else None
        note = NEEDS_GPU if small else full["note"]
        yield line(CLAIMS["logits"], "memory of full logits over the head's", name, memory, at=rows, note=note)
        for form in ("full_logits", "torch_fused"):
            other = forms[form]
            ratio = round(other["ms"] / ours["ms"], 3) if "ms" in other and "ms" in ours else None
            what = f"time of {form} over the head's"
            yield line(CLAIMS["head time"], what, name, ratio, at=rows, note=other["note"] or ours["note"])


def head_errors(rows: int, width: int, vocabulary: int, chunk_rows: int = 512) -> dict[str, tuple[float, float]]:
    """The loss and gradients of the head and of full logits, both in float32, beside full logits in float64:
    |x - x64| / |x64| of the loss, and 2-norms of differences over 2-norms of the gradients."""
    where = device()
    torch.manual_seed(0)
    pack = build_pack(nothing.documents(1, rows + 1, vocabulary), rows + 1, "none").to(where)
    hidden = torch.randn(len(pack.logit_rows), width, device=where, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=where) * width**-0.5).requires_grad_()
    objective = LM()
    totals = objective.totals(pack.examples)
    answers = Answers.of(pack.examples, pack.answer_lengths, None).to(where)
    kernels = select({"row_logps": {}}, where, torch.float32)
    ours = Head(kernels, LogitTransform(), chunk_rows)
    loss, _ = ours.backward(hidden, weight, pack, objective.of_chunks(answers, totals.to(where)), linear=True)
    full, exact = (
        _of_full_logits(hidden.detach().to(dtype), weight.detach().to(dtype), pack.targets)
        for dtype in (torch.float32, torch.float64)
    )
    found = {}
    for what, one, other, true in zip(
        ("loss", "gradient of hidden states", "gradient of the weight"),
        (loss, hidden.grad, weight.grad),
        full,
        exact,
        strict=True,
    ):
        found[what] = float(f"{_apart(one, true):.2e}"), float(f"{_apart(other, true):.2e}")
    return found


def _of_full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _apart(found: torch.Tensor | None, exact: torch.Tensor) -> float:
    assert found is not None
    return float((found.double() - exact).norm() / exact.norm())


def parts(options: Options) -> Iterator[dict[str, Any]]:
    """Eager over compiled, of the dense twins, whose norms, SwiGLU and rotation are as wide."""
    small = device().type == "cpu"
    rows, forms = (256, ("eager",)) if small else (16384, ("eager", "inductor"))
    for name in options.models:
        shape = nothing.twin(name) or name
        for part in ("norm", "add_norm", "swiglu", "rope"):
            eager, *rest = elementwise.compare(shape, part, rows, forms, options.repeats, options.out)
            speed, note = None, NEEDS_GPU
            for compiled in rest:
                note = eager["note"] or compiled["note"]
                speed = None if note else round(eager["train_ms"] / compiled["train_ms"], 2)
            yield line(CLAIMS["elementwise"], f"{part}: eager over compiled", shape, speed, at=rows, note=note)


def layer(options: Options) -> Iterator[dict[str, Any]]:
    """One layer with its projections, on one document."""
    small = device().type == "cpu"
    rows = 256 if small else 16384
    for shape in ["64/4x2x8/2x2"] if small else ["2048/4x4x128/2x2", "2048/8x2x128/2x2", "768/12x3x16/3x3"]:
        found = ccgqa.measure(ccgqa.Shape.parse(shape), rows, options.repeats)
        yield line(CLAIMS["layer"], "multi-head's time over the layer's", shape, found["train_x"], at=rows, **found)


def moments(options: Options) -> Iterator[dict[str, Any]]:
    """Bytes of the optimizer's moments, and losses."""
    steps = options.learning_steps
    for name in options.models:
        for optimizer in ("adamw", "adamw_8bit"):
            try:
                work = begin(name, options.tokens, options.length, optimizer=optimizer)
                found = scratch_runs.state_bytes(work, options.length, steps)
            except Exception as error:  # what this machine lacks for it is a result
                yield line(CLAIMS["moments"], f"{optimizer}: moments", name, None, note=failure(error))
                continue
            yield line(CLAIMS["moments"], f"{optimizer}: moments", name, round(found["bytes_a_weight"], 3))
            yield line(CLAIMS["learning"], f"{optimizer}: loss behind steps", name, round(found["loss"], 4), at=steps)
            del work


def tf32(options: Options) -> Iterator[dict[str, Any]]:
    """Float32 runs, tokens/s and losses, with and without TF32."""
    for name in options.models:
        what = "TF32: tokens/s over those without"
        if device().type == "cpu":
            yield line(CLAIMS["tf32"], what, name, None, note=NEEDS_GPU)
            continue
        rates, losses = [], []
        for on in (False, True):
            with tf32_products(on):
                work = begin(name, options.tokens, options.length, dtype=torch.float32)
                steps = list(work.steps(options.length, options.steps))
            rates.append(scratch_runs.tokens_per_second(iter(steps))["tokens_s"])
            losses.append(round(steps[-1].loss, 5))
            del work
        yield line(CLAIMS["tf32"], what, name, round(rates[1] / rates[0], 3), at=options.length)
        for products, loss in zip(("float32", "TF32"), losses, strict=True):
            yield line(CLAIMS["tf32 loss"], f"loss of {products} products", name, loss, at=options.steps)


def forms(options: Options) -> Iterator[dict[str, Any]]:
    """Tokens/s of whole steps in each form, and of ours over the others'. The last is what bits that repeat cost."""
    for name in options.models:
        if device().type == "cpu":
            yield line(CLAIMS["compiled"], "steps: tokens/s", name, None, note=NEEDS_GPU)
            continue
        rates: dict[str, float | None] = {}
        for form in scratch_forms.FORMS:
            given = (name, form, options.tokens, options.length, options.steps)
            found = scratch_forms.in_time(options.limit, scratch_forms.rate, *given)
            rates[form] = found.get("tokens_s")
            yield line(CLAIMS["compiled"], f"steps, {form}: tokens/s", name, rates[form], at=options.length, **found)
        ours = rates["ours"]
        for form, other in rates.items():
            if form != "ours" and ours and other:
                ratio = round(ours / other, 3)
                yield line(CLAIMS["tuned"], f"ours over {form}", name, ratio, at=options.length)


def graphs(options: Options) -> Iterator[dict[str, Any]]:
    """Of packs of 8,192 tokens and of `options.tokens`: a replay's tokens/s over the plain pass's, and its bits."""
    for name in options.models:
        for tokens in sorted({min(8192, options.tokens), options.tokens}):
            what = f"CUDA graph of {tokens:,} rows"
            if device().type == "cpu":
                yield line(CLAIMS["graph"], what, name, None, note=NEEDS_GPU)
                continue
            length = min(options.length, tokens)
            found = scratch_forms.in_time(options.limit, scratch_forms.graph, name, tokens, length, options.repeats)
            note = found.pop("note") or (f"host read: {found['host_reads']}" if found["host_reads"] else "")
            plain, replayed = found.get("plain_tokens_s"), found.get("graph_tokens_s")
            speed = round(replayed / plain, 3) if plain and replayed else None
            yield line(
                CLAIMS["graph"], f"{what}: tokens/s over those without", name, speed, at=length, note=note, **found
            )
            equal = found.get("equal")
            yield line(CLAIMS["graph bits"], f"{what}: equal to the bit", name, equal, at=length)


PARTS: dict[str, Callable[[Options], Iterator[dict[str, Any]]]] = {
    "lengths": lengths,
    "start": start,
    "activations": activations,
    "head": full_logits,
    "elementwise": parts,
    "layer": layer,
    "moments": moments,
    "tf32": tf32,
    "compile": forms,
    "graphs": graphs,
}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    wanted = ("nsa-tiny", "ccgqa-tiny") if small else ("m7c-125m", "hydra-100m")
    asked = parser(__doc__)
    asked.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    asked.add_argument("--models", nargs="+", choices=nothing.RECIPES, metavar="RECIPE", help="recipes by name",
                       default=[name for name in wanted if name in nothing.RECIPES])  # fmt: skip
    asked.add_argument("--lengths", nargs="+", type=_positive,
                       default=[128, 256, 512] if small else [512, 1024, 2048, 4096, 8192, 32768])  # fmt: skip
    asked.add_argument("--tokens", type=_positive, default=2048 if small else 65536, help="of a step, at least")
    asked.add_argument("--steps", type=_positive, default=5 if small else 12, help="of which the first 2 do not count")
    asked.add_argument(
        "--learning_steps", type=_positive, default=20 if small else 500, help="to compare losses behind"
    )
    asked.add_argument("--repeats", type=_positive, default=1 if small else 16)
    asked.add_argument("--limit", type=_positive, default=300, help="seconds that a form of compile or graphs may take")
    given = vars(asked.parse_args(argv))
    chosen = given.pop("parts")
    options = Options(**given)
    if options.steps <= scratch_runs.WARM_UP:
        asked.error(f"--steps {options.steps}: the first {scratch_runs.WARM_UP} do not count")
    lines = []
    for part in chosen:
        for found in PARTS[part](options):
            emit({**found, **environment()}, options.out)
            lines.append(found)
    print(table(lines, COLUMNS))
    if others := unmeasured(lines):
        print("\n" + table(others, {"row": "row", "says": "the report", "proof": "no number in this call; proof"}))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    main()
