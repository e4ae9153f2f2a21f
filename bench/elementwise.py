"""The element-wise parts of a decoder block, alone: eager, compiled and Liger's, with their errors; JSON lines.

    eager        transformers' modules and functions as they are, under autocast
    inductor     the same code compiled as tuningfork.models.policy compiles blocks, dynamic in the rows
    liger        Liger's RMSNorm, SiLU-multiply and rotary kernels, where its patches put them
    liger_fused  its norm with the residual addition in one kernel, for a norm after an addition (Llama, Qwen3)

What each part takes and gives stands in parts.py. Alone, the compiler cannot fuse a part with its neighbours, as it
does in a compiled block; eager and Liger's kernels run there as they do here.

    forward_ms, train_ms        median milliseconds: of the forward pass, as training runs it; of forward and backward
    forward_gb, train_gb        what must move at least once, in 1e9 bytes. Forward: all inputs, weights and outputs.
                                Backward: gradients of all outputs, inputs and weights, and what they are computed from
    forward_gb_s, train_gb_s    that / the time. What the L2 cache still holds of the call before counts as moved
    error_output, error_gradient, error_weight
                                largest |x - x64| / largest |x64|, where x64 comes of float64 arithmetic on the same
                                numbers: of outputs, gradients of inputs and gradients of weights, the worst of each
    ratio_output, ratio_gradient, ratio_weight
                                that / the eager form's

For each element of a row, with c bytes in the compute dtype (2 in bfloat16) and 4 in the residual stream:

    part       forward                    backward
    norm       4 + c (OLMo2: 2c)          8 + c (OLMo2: 3c)
    add_norm   8 + 2c                     12 + 2c (OLMo2: 8 + 3c)
    swiglu     3c                         5c
    qk_norm    2c (Qwen3: c + 4)          3c (Qwen3: 2c + 4)
    rope       2c (Qwen3: 4 + c)          the same; and 8 for each row and width of one head, for cosine and sine

Liger's norm gives its input's dtype, so for Qwen3's queries and keys it writes c where 4 are counted. Some of its
kernels write over what they are given (rotary: queries and keys; the gradient of SiLU-multiply: gate and up), so
repeated calls see other numbers each time. Errors are of a first call.

    python -m bench.elementwise
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.nothing import RECIPES
from bench.output import device, emit, environment, failure, parser, table
from bench.parts import PARTS, AddNorm, Family, Liger, LigerFused, Part, parts
from bench.shapes import SHAPES, config
from bench.timing import free_memory, median_ms
from tuningfork.models import compiler

Form = Callable[..., tuple[Tensor, ...]]

FORMS = ("eager", "inductor", "liger", "liger_fused")
KINDS = ("output", "gradient", "weight")  # of errors
COLUMNS = {
    "shape": "shape",
    "part": "part",
    "form": "form",
    "forward_ms": "forward ms",
    "train_ms": "train ms",
    "forward_gb_s": "forward GB/s",
    "train_gb_s": "train GB/s",
    **{f"error_{kind}": f"error: {kind}" for kind in KINDS},
    **{f"ratio_{kind}": f"/ eager: {kind}" for kind in KINDS},
    "note": "note",
}


def forms(part: Part, only: Sequence[str]) -> dict[str, Form | str]:
    """The forms of a part by name, of those in `only`; where one is missing, the reason."""
    make: dict[str, Callable[[], Form]] = {
        "eager": lambda: part,
        "inductor": lambda: torch.compile(part, dynamic=True, options=compiler.options(device())),
        "liger": lambda: part.using(Liger),
    }
    if isinstance(part, AddNorm) and not part.family.norms_branches:
        make["liger_fused"] = lambda: part.using(LigerFused)
    has_liger = part.family.device.type == "cuda" and importlib.util.find_spec("liger_kernel")
    missing = {} if has_liger else {name: "missing: liger-kernel, or a GPU" for name in FORMS if "liger" in name}
    return {name: missing.get(name) or make[name]() for name in make if name in only}


class Run:
    """One call of a form, and its gradients, on inputs of its own: some kernels write over theirs."""

    def __init__(self, form: Form, part: Part, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self.form = form
        self.inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        for x in self.inputs:  # in a model the sizes of weights say that only the number of rows varies
            torch._dynamo.mark_static(x, [dim for dim in range(x.ndim) if dim != 1])
        self.leaves = [x for x in self.inputs if x.requires_grad]
        self.weights = list(part.parameters())
        self.gradients = [gradient.clone() for gradient in gradients]
        lower = part.dtype == torch.bfloat16
        self.precision: Any = torch.autocast(self.inputs[0].device.type, part.dtype) if lower else nullcontext()

    def forward(self) -> tuple[Tensor, ...]:
        with self.precision:
            return self.form(*self.inputs)

    def train(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs, gradients of the inputs, gradients of the weights."""
        outputs = self.forward()
        # Cast in the first call only: forms differ in the dtypes that they give.
        self.gradients = [given.to(out.dtype) for given, out in zip(self.gradients, outputs, strict=True)]
        found = torch.autograd.grad(outputs, [*self.leaves, *self.weights], self.gradients)
        return outputs, found[: len(self.leaves)], found[len(self.leaves) :]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def traffic(part: Part, inputs: list[Tensor]) -> tuple[int, int]:
    """Bytes that must move at least once: in the forward pass, and in forward and backward."""
    run = Run(part, part, inputs, [])
    outputs = run.forward()
    forward = bytes_of([*inputs, *run.weights, *outputs])
    read = bytes_of([*outputs, *part.reread(inputs, outputs)]) + bytes_of(run.weights)
    return forward, forward + read + bytes_of([*run.leaves, *run.weights])


def worst(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float | None:
    """The largest relative error of several tensors; None where there are none."""
    errors = [((x.double() - x64).abs().max() / x64.abs().max()).item() for x, x64 in zip(found, exact, strict=True)]
    return max(errors, default=None)


def measure(
    form: Form, part: Part, inputs: list[Tensor], gradients: list[Tensor], repeats: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Times and rates of one form, and its errors."""
    exact = part.exact()
    sought = Run(exact, exact, [x.double() for x in inputs], [x.double() for x in gradients]).train()
    run = Run(form, part, inputs, gradients)
    errors = {f"error_{kind}": worst(*both) for kind, *both in zip(KINDS, run.train(), sought, strict=True)}
    del sought
    line: dict[str, float] = {}
    for name, call, moved in zip(("forward", "train"), (run.forward, run.train), traffic(part, inputs), strict=True):
        ms = median_ms(call, part.family.device, repeats, device_only=True)
        line |= {f"{name}_ms": round(ms, 4), f"{name}_gb": moved / 1e9, f"{name}_gb_s": round(moved / ms / 1e6, 1)}
    return line, errors


def compare(
    shape: str, name: str, rows: int, only: Sequence[str], repeats: int, out: Path | None
) -> list[dict[str, Any]]:
    """The forms of one part on the same inputs, one result line each. A form that fails says so in its line."""
    where = device()
    torch.manual_seed(0)
    torch._dynamo.reset()  # every part compiles anew, as each kind of block does
    family = Family(config(shape), rows, torch.bfloat16 if where.type == "cuda" else torch.float32, where)
    part = parts(family)[name](family)
    inputs = part.inputs()
    # Numbers that every dtype holds, so that all forms are given the same.
    gradients = [torch.randn_like(x).to(family.dtype) for x in Run(part, part, inputs, []).forward()]
    eager: dict[str, float | None] = {}
    lines = []
    for form_name, form in forms(part, only).items():
        line: dict[str, Any] = {"bench": "elementwise", "shape": shape, "part": name, "form": form_name, "rows": rows}
        line["note"] = form if isinstance(form, str) else ""
        if not isinstance(form, str):
            try:
                times, errors = measure(form, part, inputs, gradients, repeats)
                eager = errors if form_name == "eager" else eager
                line |= times | {key: significant(error) for key, error in errors.items()}
                for kind in KINDS:
                    line[f"ratio_{kind}"] = ratio(errors[f"error_{kind}"], eager.get(f"error_{kind}"))
            except Exception as error:  # a form's failure is a result
                line["note"] = failure(error)
            free_memory()
        emit({**line, **environment("liger-kernel")}, out)
        lines.append(line)
    return lines


def significant(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.3g}")


def ratio(error: float | None, eager: float | None) -> float | None:
    """None where there is no eager form, or where it is exact."""
    return round(error / eager, 3) if error is not None and eager else None


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", choices=[*SHAPES, *RECIPES], metavar="SHAPE",
                         help="of bench/shapes.py, or a recipe's",
                         default=["tiny"] if small else ["olmo2_1b", "olmo2_7b", "qwen3_1_7b"])  # fmt: skip
    options.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options.add_argument("--rows", type=int, default=64 if small else 16384)
    options.add_argument("--repeats", type=int, default=3 if small else 20)
    args = options.parse_args(argv)
    lines = []
    for shape in args.shapes:
        has = parts(Family(config(shape), args.rows, torch.float32, device()))
        for name in (name for name in args.parts if name in has):
            lines += compare(shape, name, args.rows, args.forms, args.repeats, args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
