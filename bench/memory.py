"""The curve of memory against speed: bench.step once for each way to keep activations, one JSON line each.

Few pairs and two epochs, so that a mode takes half a minute on one H100. A mode that does not fit the card says so in
`note`. `auto` says what it chose in `activation_memory`; what was asked for is `mode`.

    python -m bench.memory --model olmo2_1b --modes none budget:0.5 block offload auto
"""

from __future__ import annotations

from typing import Any

from bench import shapes, step
from bench.output import emit, environment, failure, parser, table
from tuningfork.errors import TuningforkError
from tuningfork.models.config import ACTIVATION_MEMORY_FORMS

MODES = ("none", "budget:0.8", "budget:0.6", "budget:0.4", "budget:0.2", "block", "offload", "auto")

COLUMNS = {
    "mode": "mode",
    "activation_memory": "activations",
    "pairs_s": "pairs/s",
    "mfu": "MFU",
    "hfu": "HFU",
    "peak_gib": "peak GiB",
    "note": "",
}


def measure(mode: str, **settings: Any) -> dict[str, Any]:
    """The line of bench.step for one mode; where that is refused or does not fit, a short one with the reason."""
    try:
        return {"mode": mode, **step.measure(activation_memory=mode, **settings), "note": ""}
    except TuningforkError as error:
        return {"mode": mode, "model": settings.get("model"), **environment(), "note": failure(error)}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--modes", nargs="+", default=MODES, metavar="MODE", help=ACTIVATION_MEMORY_FORMS)
    options.add_argument("--pairs", type=int, default=128)
    options.add_argument("--pack_tokens", type=int, default=16384)
    options.add_argument("--examples_per_step", type=int, default=16)
    options.add_argument("--head_chunk_rows", type=int, default=8192)
    options.add_argument("--epochs", type=int, default=2, help="the first one warms up")
    settings = vars(options.parse_args(argv))
    out, modes = settings.pop("out"), settings.pop("modes")
    lines = []
    for mode in modes:
        lines.append(measure(mode, **settings))
        emit(lines[-1], out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
