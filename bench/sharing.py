"""What laying a prompt once saves of a model's passes: the same pairs in one pack, shared and unshared; JSON lines.

One compiled model of a named shape runs its embeddings and decoder blocks forward and backward: all that a prompt's
rows go through. The head is left out, since it has rows for answers only, as is the optimizer. First the yardstick's
own pairs, then pairs of equal lengths whose prompt is `ratio` times as long as an answer. The two layouts take turns,
so that a card that grows warm slows both.

    ms              milliseconds of device time, from the profiler; on a CPU operators' own time
    attention_ms    of it, in attention
    saved           1 - shared / unshared of ms; saved_attention of attention_ms, saved_rest of what is left
    saved_tokens    1 - tokens shared / unshared: what the token count alone allows
    saved_pairs     1 - visible (query, key) pairs shared / unshared: what attention must still do. An answer sees all
                    of its prompt however often that is laid, so for short prompts this is far below saved_tokens
    reached         saved / saved_tokens
    reached_rest, reached_attention     saved_rest / saved_tokens, saved_attention / saved_pairs

    python -m bench.sharing --model olmo2_1b
"""

from __future__ import annotations

from typing import Any

import torch

from bench import shapes
from bench.attention import RATIOS, Layouts, pairs_of_ratio
from bench.device_time import DeviceProfile
from bench.output import device, emit, environment, parser, rounded, table
from bench.timing import free_memory
from tuningfork.models.policy import Policy
from tuningfork.records import PackedBatch

WARMUP = 2  # passes of each layout that are not counted
COLUMNS = {
    "pairs": "pairs",
    "ratio": "prompt/answer",
    "shared_rows": "rows shared",
    "unshared_rows": "unshared",
    "shared_ms": "ms shared",
    "unshared_ms": "unshared",
    "saved": "saved",
    "saved_tokens": "of tokens",
    "reached": "reached",
    "reached_rest": "but for attention",
    "reached_attention": "attention, of pairs",
}


def measure(policy: Policy, layouts: Layouts, repeats: int) -> dict[str, float]:
    """`ms` and `attention_ms` of both layouts."""
    packs = {name: getattr(layouts, name).to(policy.device) for name in ("shared", "unshared")}
    profiles = {name: DeviceProfile() for name in packs}
    for turn in range(WARMUP + repeats):
        for name, pack in packs.items():
            if turn < WARMUP:
                _run(policy, pack)
                continue
            profiles[name].start()
            _run(policy, pack)
            profiles[name].stop()
    times: dict[str, float] = {}
    for name, profile in profiles.items():
        kinds = profile.by_category(repeats)
        times |= {f"{name}_ms": round(sum(kinds.values()), 3), f"{name}_attention_ms": round(kinds["attention"], 3)}
    return times


def _run(policy: Policy, pack: PackedBatch) -> None:
    policy.model.zero_grad()
    hidden = policy.hidden_rows(pack)
    hidden.backward(torch.ones_like(hidden))
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def compare(policy: Policy, layouts: Layouts, repeats: int) -> dict[str, Any]:
    """The line of one set of pairs."""
    line: dict[str, Any] = {f"{name}_rows": getattr(layouts, name).unique_rows for name in ("shared", "unshared")}
    line |= measure(policy, layouts, repeats)
    free_memory()
    for name in ("shared", "unshared"):
        line[f"{name}_rest_ms"] = round(line[f"{name}_ms"] - line[f"{name}_attention_ms"], 3)
    once, repeated = layouts.visible_pairs()
    saved = {
        "saved_tokens": 1 - line["shared_rows"] / line["unshared_rows"],
        "saved_pairs": 1 - once / repeated,
        "saved": _saved(line, "ms"),
        "saved_rest": _saved(line, "rest_ms"),
        "saved_attention": _saved(line, "attention_ms"),
    }
    reached = {
        "reached": saved["saved"] / saved["saved_tokens"],
        "reached_rest": saved["saved_rest"] / saved["saved_tokens"],
        "reached_attention": saved["saved_attention"] / saved["saved_pairs"],
    }
    return line | {name: rounded(value, 4) for name, value in (saved | reached).items()}


def _saved(line: dict[str, Any], what: str) -> float:
    unshared = line[f"unshared_{what}"]
    return 1 - line[f"shared_{what}"] / unshared if unshared else float("nan")


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny" if small else "olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--tokens", type=int, default=4096 if small else 16384, help="rows of a shared pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--answer", type=int, default=64 if small else 256, help="answer length for the ratios")
    options.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), help="prompt / answer length")
    options.add_argument("--repeats", type=int, default=2 if small else 5)
    args = options.parse_args(argv)
    where = device()
    policy = Policy.fast(shapes.build(args.model, where), torch.bfloat16 if where.type == "cuda" else torch.float32)
    if where.type == "cuda":
        policy.compile()
    vocabulary = policy.config.vocab_size
    cases: list[tuple[dict[str, Any], Any]] = [({"pairs": "yardstick"}, shapes.yardstick(args.pairs, vocabulary))]
    for ratio in args.ratios:
        pairs = pairs_of_ratio(ratio, args.answer, args.tokens, vocabulary)
        cases.append(({"pairs": "equal", "ratio": ratio}, pairs))
    lines = []
    for about, examples in cases:
        found = compare(policy, Layouts.of(examples, args.tokens), args.repeats)
        lines.append({"bench": "sharing", "model": args.model, **about, **found, **environment()})
        emit(lines[-1], args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
