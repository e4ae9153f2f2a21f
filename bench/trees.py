"""What examples begin with in common, laid once: training and scoring with trees, with shared prompts, and with nothing
shared, in turns; how much faster that is, and how much of the saving in flops that reaches.

    python -m bench.trees --shapes turns rankings --orders grouped

A line for each shape of data (tree_shapes.py) and order of its examples:

    rows            token slots of the steps, padding left out, for each way to share
    flops           model flops of the steps (models/flops.py), likewise
    examples_s      examples trained on in a second, likewise: packs are built before, the optimizer's move is in it
    pack_s          seconds to find the trees of a step and lay its packs out; a run does this in a thread of its own
    counted         flops with the other way / flops with trees
    faster          examples_s with trees / examples_s with the other way
    reached         (1 - time with trees / time with the other way) / (1 - flops with trees / flops with the other way)
    equal           whether log-probs of all answers are the same to the bit in all ways
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import torch
from tuningfork.objective.sft import SFT

from bench import shapes, tree_shapes
from bench.output import device, emit, environment, parser, rounded, table
from bench.timing import free_memory
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.models.flops import FlopCounter
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.objective.base import Objective
from tuningfork.objective.pairs import DPO
from tuningfork.records import PackedBatch, TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

ROUNDS = 2  # timed ones, behind one that compiles

SHAPES: dict[str, tuple[Objective, Sequence[Share]]] = {
    "turns": (SFT(), ("tree", "prompt")),  # an example of one answer shares no prompt with itself
    "trajectories": (SFT(), ("tree", "prompt")),
    "rankings": (DPO(), ("tree", "prompt", "none")),
    "pairs": (DPO(), ("tree", "prompt", "none")),
}

COLUMNS = {
    "shape": "shape",
    "order": "order",
    "work": "work",
    "than": "than",
    "tree_rows": "rows",
    "than_rows": "rows before",
    "counted": "counted",
    "faster": "faster",
    "reached": "reached",
    "tree_examples_s": "examples/s",
    "than_examples_s": "before",
    "equal": "equal bits",
}


def groups_of(shape: str, vocabulary: int, small: bool) -> list[list[TokenExample]]:
    """Groups of examples of a shape of data; of a small size for a CPU."""
    if shape == "turns":
        return tree_shapes.turns(vocabulary, *((4, 200) if small else (60,)))
    if shape == "trajectories":
        return tree_shapes.trajectories(vocabulary, *((8, 100) if small else (128,)))
    if shape == "rankings":
        return tree_shapes.rankings(vocabulary, 2 if small else 43)
    return [[example] for example in shapes.yardstick(16 if small else 128, vocabulary)]


def steps_of(groups: list[list[TokenExample]], order: str, size: int, count: int) -> list[list[TokenExample]]:
    """The first steps of `size` examples: groups one after the other, or all examples shuffled."""
    examples = list(chain.from_iterable(groups))
    if order == "shuffled":
        examples = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    steps = [examples[first : first + size] for first in range(0, len(examples) - size + 1, size)]
    return steps[:count]


def compare(
    scorer: Scorer,
    train: TrainConfig,
    shape: str,
    order: str,
    steps: Sequence[list[TokenExample]],
    tokens: int,
    work: str,
) -> list[dict[str, Any]]:
    """A line for each other way to share that trees are compared with."""
    objective, ways = SHAPES[shape]
    found = {share: _Way(scorer, steps, tokens, share) for share in ways}
    logps = {share: way.score(scorer) for share, way in found.items()}
    optimizer = build_optimizer(scorer.policy.model, train)
    for turn in range(1 + ROUNDS):
        for share in ways if turn % 2 else ways[::-1]:
            way = found[share]
            seconds = way.train(scorer, objective, optimizer) if work == "training" else way.score_timed(scorer)
            if turn:
                way.seconds.append(seconds)
    free_memory()
    return [_line(shape, order, work, found, logps, other) for other in ways if other != "tree"]


class _Way:
    """The packs of some steps in one way to share."""

    def __init__(self, scorer: Scorer, steps: Sequence[list[TokenExample]], tokens: int, share: Share) -> None:
        limits = PackLimits.plan(tokens, share, compiled=scorer.policy.compiled)
        self.share = share
        begun = time.perf_counter()
        self.packs = [build_packs(examples, limits) for examples in steps]
        self.pack_seconds = (time.perf_counter() - begun) / len(steps)
        self.examples = sum(map(len, steps))
        self.rows = sum(pack.used_slots for pack in self._all())
        self.seconds: list[float] = []
        self.flops = scorer.policy.flops()

    def _all(self) -> list[PackedBatch]:
        return [pack for step in self.packs for pack in step]

    def score(self, scorer: Scorer) -> dict[str, list[float]]:
        """Log-probs of each example's answers."""
        scored = {}
        for pack in self._all():
            logps = iter(scorer.score(pack).tolist())
            for example in pack.examples:
                scored[example.id] = [next(logps) for _ in example.answers]
        return scored

    def score_timed(self, scorer: Scorer) -> float:
        return _timed(lambda: [scorer.score(pack) for pack in self._all()])

    def train(self, scorer: Scorer, objective: Objective, optimizer: torch.optim.Optimizer) -> float:
        """Seconds to train on all steps once."""
        batches = []
        for packs in self.packs:
            answers = sum(len(pack.answer_lengths) for pack in packs)
            reference = np.zeros(answers) if objective.needs_reference else None
            batches.append(StepBatch.of(packs, objective, reference))
        return _timed(lambda: [train_step(scorer, objective, optimizer, batch, 1.0) for batch in batches])

    def work(self, kind: str) -> int:
        """Model flops of all steps."""
        count: FlopCounter = self.flops
        of = count.training if kind == "training" else count.forward
        return sum(of(pack.spans, len(pack.logit_rows)) for pack in self._all())


def _timed(run: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _line(
    shape: str, order: str, work: str, found: Mapping[str, _Way], logps: Mapping[str, Any], other: str
) -> dict[str, Any]:
    tree, than = found["tree"], found[other]
    (tree_s, tree_flops), (than_s, than_flops) = ((median(way.seconds), way.work(work)) for way in (tree, than))
    saved = 1 - tree_flops / than_flops
    return {
        "bench": "trees",
        "shape": shape,
        "order": order,
        "work": work,
        "than": other,
        "steps": len(tree.packs),
        "examples": tree.examples,
        "tree_packs": len(tree._all()),
        "than_packs": len(than._all()),
        "tree_rows": tree.rows,
        "than_rows": than.rows,
        "tree_flops": tree_flops,
        "than_flops": than_flops,
        "tree_examples_s": rounded(tree.examples / tree_s),
        "than_examples_s": rounded(than.examples / than_s),
        "tree_pack_s": rounded(tree.pack_seconds, 4),
        "than_pack_s": rounded(than.pack_seconds, 4),
        "counted": rounded(than_flops / tree_flops, 3),
        "faster": rounded(than_s / tree_s, 3),
        "reached": rounded((1 - tree_s / than_s) / saved, 3) if saved > 0.01 else None,
        "equal": logps["tree"] == logps[other],
        **environment(),
    }


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny" if small else "olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    options.add_argument("--orders", nargs="*", default=["grouped", "shuffled"], choices=["grouped", "shuffled"])
    options.add_argument("--work", nargs="*", default=["training"], choices=["training", "scoring"])
    options.add_argument("--tokens", type=int, default=8192 if small else 32768, help="of a pack")
    options.add_argument("--examples_per_step", type=int, default=16 if small else 64)
    options.add_argument("--steps", type=int, default=1 if small else 2)
    options.add_argument("--activation_memory", default="none")
    args = options.parse_args(argv)
    where = device()
    policy = Policy.fast(
        shapes.build(args.model, where, positions=args.tokens), torch.float32 if small else torch.bfloat16
    )
    if not small:
        policy.compile()
    policy.keep_activations(args.activation_memory)
    scorer, train = Scorer.of(policy, 8192), TrainConfig(learning_rate=1e-7)
    lines = []
    for shape in args.shapes:
        groups = groups_of(shape, policy.vocab_size, small)
        for order in args.orders:
            if shape == "pairs" and order == "grouped":
                continue
            steps = steps_of(groups, order, min(args.examples_per_step, sum(map(len, groups))), args.steps)
            for work in args.work:
                for line in compare(scorer, train, shape, order, steps, args.tokens, work):
                    lines.append(line)
                    emit(line, args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
