"""What laying a prompt once saves of a model's passes, pair by pair; JSON lines.

One compiled model of a named shape runs its embeddings and decoder blocks forward and backward: all that a prompt's
rows go through. The head is left out, since it has rows for answers only, as is the optimizer. First the yardstick's
own pairs, then pairs whose prompt is `ratio` times as long as an answer, of equal lengths but for a few short ones
that fill the end of a pack.

A pack is filled to the same rows twice: with each prompt laid once (shared), and with it before every answer
(unshared), which leaves room for fewer pairs. So products have one shape in both, whose speed depends on the rows in
jumps, and what a pack costs whatever is in it costs both the same. The two take turns, and turns at going first: where
one always did, it took 2 to 3 % longer.

    ms              milliseconds of a pack's device time, from the profiler, the median of the turns; on a CPU
                    operators' own time
    attention_ms    of it, in attention
    plain_tokens    tokens of its pairs with a prompt for each answer: the work that a pack gets done
    saved           1 - shared / unshared of ms for a plain token; saved_attention of attention_ms, saved_rest of what
                    is left
    saved_tokens    1 - tokens shared / unshared: what the token count alone allows
    saved_pairs     1 - visible (query, key) pairs shared / unshared: what attention must still do. An answer sees all
                    of its prompt however often that is laid, so for short prompts this is far below saved_tokens
    reached         saved / saved_tokens
    reached_rest, reached_attention     saved_rest / saved_tokens, saved_attention / saved_pairs

    python -m bench.sharing --model olmo2_1b
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench import shapes
from bench.attention import RATIOS, visible_pairs
from bench.device_time import DeviceProfile
from bench.output import device, emit, environment, parser, rounded, table
from bench.timing import free_memory
from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.pack import slots_of_each
from tuningfork.data.packing.tree import Share
from tuningfork.models.policy import Policy
from tuningfork.records import PackedBatch, TokenExample

WARMUP = 2  # passes of each layout that are not counted
SHARE: dict[str, Share] = {"shared": "prompt", "unshared": "none"}
COLUMNS = {
    "pairs": "pairs",
    "ratio": "prompt/answer",
    "rows": "rows",
    "shared_pairs": "pairs shared",
    "unshared_pairs": "unshared",
    "shared_ms": "ms shared",
    "unshared_ms": "unshared",
    "saved": "saved",
    "saved_tokens": "of tokens",
    "reached": "reached",
    "reached_rest": "but for attention",
    "reached_attention": "attention, of pairs",
}


def fill(examples: list[TokenExample], rows: int, share: Share) -> PackedBatch:
    """A pack of `rows` rows with as many of the examples as fit, the first ones first."""
    chosen, used = [], 0
    for example in examples:
        needed = int(slots_of_each([example], share)[0])
        if used + needed <= rows:
            chosen.append(example)
            used += needed
    return build_pack(chosen, rows, share)


def pairs_that_fill(ratio: float, answer: int, rows: int, vocabulary: int) -> list[TokenExample]:
    """Pairs of one prompt and two answers, the prompt `ratio` times as long: enough to fill `rows`, then ever shorter
    ones."""
    sizes = [answer] * (rows // answer) + [answer >> halvings for halvings in range(1, answer.bit_length())]
    return shapes.random_pairs([(round(ratio * size), size, size) for size in sizes], vocabulary)


def measure(policy: Policy, packs: dict[str, PackedBatch], repeats: int) -> dict[str, float]:
    """`ms` and `attention_ms` of each pack: medians, since one slow turn moves a mean by more than a saving's tenth."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in packs}
    order = list(packs)
    for turn in range(WARMUP + repeats):
        for name in order:
            if turn < WARMUP:
                _run(policy, packs[name])
                continue
            profile = DeviceProfile()
            profile.start()
            _run(policy, packs[name])
            profile.stop()
            turns[name].append(profile.by_category(1))
        order.reverse()
    times: dict[str, float] = {}
    for name, found in turns.items():
        whole = median(sum(kinds.values()) for kinds in found)
        attention = median(kinds["attention or window"] for kinds in found)
        times |= {f"{name}_ms": round(whole, 3), f"{name}_attention_ms": round(attention, 3)}
    return times


def _run(policy: Policy, pack: PackedBatch) -> None:
    policy.model.zero_grad()
    hidden = policy.hidden_rows(pack)
    hidden.backward(torch.ones_like(hidden))
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def compare(policy: Policy, examples: list[TokenExample], rows: int, repeats: int) -> dict[str, Any]:
    """The line of one set of pairs."""
    packs = {name: fill(examples, rows, share) for name, share in SHARE.items()}
    times = measure(policy, {name: pack.to(policy.device) for name, pack in packs.items()}, repeats)
    free_memory()
    plain = {name: sum(example.plain_tokens for example in pack.examples) for name, pack in packs.items()}
    unique = sum(example.unique_tokens for example in packs["shared"].examples)
    once, _ = visible_pairs(packs["shared"].examples)
    _, repeated = visible_pairs(packs["unshared"].examples)

    def saved(what: Callable[[str], float]) -> float:
        """1 - what a plain token costs shared / unshared."""
        costs = {name: what(name) / plain[name] for name in SHARE}
        return 1 - costs["shared"] / costs["unshared"] if costs["unshared"] else float("nan")

    found = {
        "saved_tokens": 1 - unique / plain["shared"],
        "saved_pairs": 1 - (once / plain["shared"]) / (repeated / plain["unshared"]),
        "saved": saved(lambda name: times[f"{name}_ms"]),
        "saved_rest": saved(lambda name: times[f"{name}_ms"] - times[f"{name}_attention_ms"]),
        "saved_attention": saved(lambda name: times[f"{name}_attention_ms"]),
    }
    found |= {
        "reached": found["saved"] / found["saved_tokens"],
        "reached_rest": found["saved_rest"] / found["saved_tokens"],
        "reached_attention": found["saved_attention"] / found["saved_pairs"],
    }
    about = {"rows": rows} | {f"{name}_pairs": len(pack.examples) for name, pack in packs.items()}
    tokens = {f"{name}_plain_tokens": plain[name] for name in SHARE}
    return about | tokens | times | {name: rounded(value, 4) for name, value in found.items()}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny" if small else "olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--rows", type=int, default=4096 if small else 16384, help="of a pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--answer", type=int, default=64 if small else 256, help="answer length for the ratios")
    options.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), help="prompt / answer length")
    options.add_argument("--repeats", type=int, default=2 if small else 6, help="even, as turns are")
    args = options.parse_args(argv)
    if args.repeats % 2:
        options.error(f"--repeats {args.repeats} is odd: one of the two would go first more often")
    where = device()
    policy = Policy.fast(shapes.build(args.model, where), torch.bfloat16 if where.type == "cuda" else torch.float32)
    if where.type == "cuda":
        policy.compile()
    vocabulary = policy.config.vocab_size
    cases: list[tuple[dict[str, Any], Any]] = [({"pairs": "yardstick"}, shapes.yardstick(args.pairs, vocabulary))]
    for ratio in args.ratios:
        pairs = pairs_that_fill(ratio, args.answer, args.rows, vocabulary)
        cases.append(({"pairs": "equal", "ratio": ratio}, pairs))
    lines = []
    for about, examples in cases:
        found = compare(policy, examples, args.rows, args.repeats)
        lines.append({"bench": "sharing", "model": args.model, **about, **found, **environment()})
        emit(lines[-1], args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
