"""At every start: does this very model give a packed example the numbers that it has alone?

Families differ in ways that no table of ours can promise to know (logit scales, new attention keywords, state that
leaks). A few sequences through plain transformers and through our path settle it for the model at hand: longer than the
tiles of the kernels, and than the windows of its layers, so that each layer has something to cut off. They lie as a
tree in which others leave each of them in the middle of its prompt and of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import SMALLEST_COMPILED, PackLimits
from tuningfork.data.packing.tree import Share, grow
from tuningfork.errors import LOADING, ModelError, OutOfMemory, enough_memory
from tuningfork.models.backbone import Backbone
from tuningfork.models.hf import attention, layers
from tuningfork.models.policy import Policy, Spread
from tuningfork.records import GRID, PackedBatch, Source, TokenAnswer, TokenExample
from tuningfork.train.checks.recurrence_check import TOLERANCE, apart, blamed, check_first_state, first_state

_LONGEST = {"cpu": 640, "cuda": 4608}  # tokens: beyond the windows of 512 and of 4,096 that models have


def check_packed_equals_alone(model: PreTrainedModel, path: str, spread: Spread | None = None) -> None:
    """Compare in float32 with plain kernels, before anything is compiled; and run twice, to the same bits.

    Weights held in fewer bits are float32 meanwhile, 4 bytes each: in bfloat16 the two ways differ by as much as some
    wrong models do (5e-3), and training, which follows, needs more memory than that.

    Args:
        spread: how the model is spread over processes, all of which come here.

    Raises:
        ModelError: the model does not run so, gives other numbers packed, or other numbers when run again.
    """
    with in_float32(model, spread):
        _compare(Policy.plain(model, torch.float32, spread), path)


def _compare(policy: Policy, path: str) -> None:
    model = policy.model
    batch = probe_pack(probes(policy), "tree", compiled=False).to(model.device)
    with torch.no_grad():
        try:
            with enough_memory("checking the model", LOADING), first_state(model) as packed_state:
                packed, again = (_score_packed(policy, batch) for _ in range(2))
        except (ModelError, OutOfMemory):
            raise
        except Exception as error:
            raise ModelError(
                f"{path}: {type(model).__name__} does not run with packed attention ({error}). Not supported."
            ) from error
        if not torch.allclose(packed, again, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"{path}: {type(model).__name__} gives other numbers when run again: there is chance in it (dropout, "
                "layers left out), or an order of addition that changes. The reference could not be equal to the "
                "starting policy. Set every rate of dropout or layer drop in config.json to 0."
            )
        try:
            memory = enough_memory("checking the model", LOADING)
            with memory, layers.taken_out(model), first_state(model) as alone_state:
                alone = torch.cat([score for example in batch.examples for score in _score_alone(model, example)])
        except OutOfMemory:
            raise
        except Exception as error:
            raise ModelError(
                f"{path}: {type(model).__name__} does not run with its own eager attention ({error}), so packed "
                "numbers cannot be checked against it. Not supported."
            ) from error
        worst = apart(packed, alone)
        if not worst <= TOLERANCE:
            raise ModelError(
                f"{path}: {type(model).__name__} gives packed examples other log-probs than the same examples alone "
                f"(relative difference {worst:.1e}). Some layer of it looks across examples or ahead, or changes its "
                "logits in a way that is not known here. Training it would be wrong, so it is not supported."
                f"{blamed(policy, batch, _score_packed)}"
            )
        if packed_state:
            check_first_state(policy, batch, _score_packed, packed_state[0], alone_state, path)


@contextmanager
def in_float32(model: PreTrainedModel, spread: Spread | None = None) -> Iterator[None]:
    """The weights in float32, and then as they were: to float32 and back, no bit of a narrower number is lost.

    Spread weights must be float32 already (setup/model.py has them so while it checks); what of them is gathered in
    fewer bits is widened."""
    held = [(weight, weight.dtype) for weight in model.parameters() if weight.dtype.itemsize < 4]
    try:
        for weight, _ in held:
            weight.data = weight.data.float()
        with nullcontext() if spread is None else spread.widened():
            yield
    finally:
        for weight, dtype in held:
            weight.data = weight.data.to(dtype)


def untried(model: Backbone) -> list[str]:
    """In words, what the probes leave untried of a model's mixers."""
    longest = max(example.longest for example in probes(model))
    return [words for mixer in model.mixers if (words := mixer.untried(longest))]


def probes(model: Backbone) -> list[TokenExample]:
    """Examples of random tokens, of the lengths that the model's mixers must be tried on, as far as the device's limit
    and the model's positions go."""
    limit = _LONGEST.get(model.device.type, _LONGEST["cpu"])
    limit = min(limit, model.positions or limit)
    shapes = [shape for mixer in model.mixers for shape in mixer.probes(limit)]
    vocab_size = model.vocab_size
    rng = np.random.default_rng(0)

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, vocab_size, size=(n,)).astype(np.int32)

    return [
        TokenExample(
            Source("self-check", row), draw(p), tuple(TokenAnswer(draw(a), np.ones(a, dtype=bool)) for a in answers)
        )
        for row, (p, answers) in enumerate(shapes, start=1)
    ]


def probe_pack(examples: Sequence[TokenExample], share: Share, compiled: bool) -> PackedBatch:
    """Examples in one pack, with as many token slots as a run would give it.

    Args:
        share: none, prompt or tree, see data/packing/tree.py. In a tree each of them has neighbours that leave it, so
            that its path is cut where no kernel would have it cut, and more than once.
    """
    if share == "tree":
        examples = [*examples, *(neighbour for example in examples for neighbour in _neighbours(example))]
    forest = grow(examples, share, smallest_stem=1).of(range(len(examples)))
    limits = PackLimits.plan(2 * forest.rows + SMALLEST_COMPILED, share, compiled)
    return lay(examples, forest, limits.slots(forest.rows))


def _neighbours(example: TokenExample) -> Iterator[TokenExample]:
    """Examples whose sequences leave an example's first in the middle of its prompt, and of its answer.

    They go on with a few of its own tokens, each replaced by the one before it in the vocabulary.
    """
    sequence = np.concatenate([example.prompt_ids, example.answers[0].ids])
    p, end = len(example.prompt_ids), len(sequence)
    for first, last in ((0, p), (p, end)):
        if last - first > 1:
            cut = _middle(first, last)
            own = sequence[cut : cut + 9]
            answer = TokenAnswer(np.where(own > 0, own - 1, 1).astype(np.int32), np.ones(len(own), bool))
            yield TokenExample(example.source, sequence[:cut], (answer,))


def _middle(first: int, last: int) -> int:
    """A position about halfway between two that are not neighbours; if it can be, no multiple of a mixer's steps."""
    middle = (first + last) // 2
    return middle + 1 if middle % GRID == 0 and middle + 1 < last else middle


def _score_packed(policy: Policy, batch: PackedBatch) -> torch.Tensor:
    """Log-probs of all answers' tokens: token by token, for in a sum of many, one that is wrong would not show."""
    logits = policy.hidden_rows(batch) @ policy.head_weight.t()
    if policy.head_bias is not None:
        logits += policy.head_bias
    logps = policy.kernels["row_logps"].row_logps(logits, batch.targets, policy.transform)[0]
    return logps[batch.logit_row_of_counted].cpu()


def _score_alone(model: PreTrainedModel, example: TokenExample) -> list[torch.Tensor]:
    """Log-probs of each answer's tokens by the model's own forward and its own eager attention."""
    model.set_attn_implementation("eager")
    of_backbone = vars(model).pop("forward", None)  # of a spread model: its class's own gives the logits
    try:
        scores = []
        for answer in example.answers:
            ids = torch.from_numpy(np.concatenate([example.prompt_ids, answer.ids])).long()[None].to(model.device)
            rows = torch.arange(len(example.prompt_ids) - 1, ids.shape[1] - 1, device=ids.device)
            logps = model(input_ids=ids, use_cache=False).logits[0, rows].double().log_softmax(-1)
            scores.append(logps.gather(1, ids[0, rows + 1][:, None])[:, 0].cpu())
        return scores
    finally:
        model.set_attn_implementation(attention.NAME)
        if of_backbone is not None:
            model.forward = of_backbone  # type: ignore[method-assign]
