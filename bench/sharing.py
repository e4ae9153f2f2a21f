"""What laying a prompt once saves of forward and backward passes: the same pairs, shared and unshared; JSON lines.

One compiled model of a named shape, without its optimizer, runs one pack: first the yardstick's own pairs, then pairs
of equal lengths whose prompt is `ratio` times as long as an answer.

    blocks_ms       milliseconds forward and backward, embeddings and decoder blocks alone: all that a prompt's rows
                    go through
    whole_ms        with the head and DPO's loss; the head has rows for answers only, so sharing cannot make it cheaper
    saved_blocks, saved     1 - shared / unshared of these times
    saved_tokens    1 - tokens shared / unshared: what the token count alone allows
    reached         saved_blocks / saved_tokens; above 1 where attention, which grows faster, saves more

    python -m bench.sharing --model olmo2_1b
"""

from __future__ import annotations

from typing import Any

import torch

from bench import shapes
from bench.attention import RATIOS, Layouts, pairs_of_ratio
from bench.output import device, emit, environment, parser, rounded, table
from bench.timing import free_memory, median_ms
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import BatchScale, PreferenceObjective
from tuningfork.records import PackedBatch

COLUMNS = {
    "pairs": "pairs",
    "ratio": "prompt/answer",
    "shared_rows": "rows shared",
    "unshared_rows": "unshared",
    "shared_blocks_ms": "blocks ms shared",
    "unshared_blocks_ms": "unshared",
    "saved_blocks": "saved of blocks",
    "saved": "saved of all",
    "saved_tokens": "saved of tokens",
    "reached": "reached",
}


def measure(policy: Policy, pack: PackedBatch, head_chunk_rows: int, repeats: int) -> dict[str, float]:
    """`blocks_ms` and `whole_ms` of one pack."""
    where = policy.device
    pack = pack.to(where)
    head, objective = Head(policy.kernels, policy.transform, head_chunk_rows), PreferenceObjective(ObjectiveConfig())
    scale = BatchScale.of(pack.examples)
    lengths = torch.tensor(pack.answer_lengths, dtype=torch.float64, device=where)
    reference = torch.zeros_like(lengths)
    gradient = torch.zeros_like(policy.hidden_rows(pack))

    def blocks() -> None:
        policy.model.zero_grad()
        policy.hidden_rows(pack).backward(gradient)

    def whole() -> None:
        policy.model.zero_grad()
        head.backward(
            policy.hidden_rows(pack),
            policy.head_weight,
            pack,
            lambda a, b, logps: objective.loss(logps, reference[a:b], lengths[a:b], scale),
        )

    return {
        f"{name}_ms": round(median_ms(run, where, repeats), 3) for name, run in (("blocks", blocks), ("whole", whole))
    }


def compare(policy: Policy, layouts: Layouts, head_chunk_rows: int, repeats: int) -> dict[str, Any]:
    """The line of one set of pairs."""
    line: dict[str, Any] = {}
    for name, pack in (("unshared", layouts.unshared), ("shared", layouts.shared)):
        line[f"{name}_rows"] = pack.unique_rows
        line |= {f"{name}_{what}": ms for what, ms in measure(policy, pack, head_chunk_rows, repeats).items()}
        free_memory()
    tokens = 1 - line["shared_rows"] / line["unshared_rows"]
    blocks = 1 - line["shared_blocks_ms"] / line["unshared_blocks_ms"]
    return line | {
        "saved_blocks": rounded(blocks, 3),
        "saved": rounded(1 - line["shared_whole_ms"] / line["unshared_whole_ms"], 3),
        "saved_tokens": rounded(tokens, 3),
        "reached": rounded(blocks / tokens, 3),
    }


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny" if small else "olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--tokens", type=int, default=4096 if small else 16384, help="rows of a shared pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--answer", type=int, default=64 if small else 256, help="answer length for the ratios")
    options.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), help="prompt / answer length")
    options.add_argument("--head_chunk_rows", type=int, default=8192)
    options.add_argument("--repeats", type=int, default=2 if small else 8)
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
        found = compare(policy, Layouts.of(examples, args.tokens), args.head_chunk_rows, args.repeats)
        lines.append({"bench": "sharing", "model": args.model, **about, **found, **environment()})
        emit(lines[-1], args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
