"""At every start: does this very model give a packed example the numbers that it has alone?

Families differ in ways that no table of ours can promise to know (logit scales, new attention keywords, state that
leaks). A few short sequences through plain transformers and through our path settle it for the model at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from tuningfork.data.layout import build
from tuningfork.errors import ModelError, OutOfMemory, enough_memory
from tuningfork.models import attention
from tuningfork.models.policy import Policy
from tuningfork.objective.head import Head
from tuningfork.records import Source, TokenAnswer, TokenExample

_SHAPES = ((5, (4, 7)), (9, (6, 3)))
_TOLERANCE = 1e-3  # of the largest log-prob; float32 differs by 1e-6, a wrong model by its whole size


def check_packed_equals_alone(model: PreTrainedModel, path: str) -> None:
    """Compare in float32 with plain kernels, before anything is compiled. Raises ModelError.

    Weights held in fewer bits are float32 meanwhile, 4 bytes each: in bfloat16 the two ways differ by as much as some
    wrong models do (5e-3), and training, which follows, needs more memory than that.
    """
    with _in_float32(model):
        _compare(model, path)


def _compare(model: PreTrainedModel, path: str) -> None:
    examples = _examples(model.config.vocab_size)
    batch = build(examples, 64, share_prompt=True).to(model.device)
    policy = Policy.plain(model, torch.float32)
    with torch.no_grad():
        try:
            with enough_memory("checking the model"):
                hidden = policy.hidden_rows(batch)
        except (ModelError, OutOfMemory):
            raise
        except Exception as error:
            raise ModelError(
                f"{path}: {type(model).__name__} does not run with packed attention ({error}). Not supported."
            ) from error
        head = Head(policy.kernels, policy.transform, 8192)
        packed = head.score(hidden, policy.head_weight, batch, policy.head_bias).cpu()
        try:
            with enough_memory("checking the model"):
                alone = torch.stack([score for example in examples for score in _score_alone(model, example)])
        except OutOfMemory:
            raise
        except Exception as error:
            raise ModelError(
                f"{path}: {type(model).__name__} does not run with its own eager attention ({error}), so packed "
                "numbers cannot be checked against it. Not supported."
            ) from error
    worst = float((packed - alone).abs().max() / alone.abs().max())
    if not worst <= _TOLERANCE:
        raise ModelError(
            f"{path}: {type(model).__name__} gives packed examples other log-probs than the same examples alone "
            f"(relative difference {worst:.1e}). Some layer of it looks across examples, or changes its logits in a "
            "way that is not known here. Training it would be wrong, so it is not supported."
        )


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The weights in float32, and then as they were: to float32 and back, no bit of a narrower number is lost."""
    held = [(weight, weight.dtype) for weight in model.parameters() if weight.dtype.itemsize < 4]
    try:
        for weight, _ in held:
            weight.data = weight.data.float()
        yield
    finally:
        for weight, dtype in held:
            weight.data = weight.data.to(dtype)


def _examples(vocab_size: int) -> list[TokenExample]:
    rng = np.random.default_rng(0)

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, vocab_size, size=(n,)).astype(np.int32)

    return [
        TokenExample(
            Source("self-check", row), draw(p), tuple(TokenAnswer(draw(a), np.ones(a, dtype=bool)) for a in answers)
        )
        for row, (p, answers) in enumerate(_SHAPES, start=1)
    ]


def _score_alone(model: PreTrainedModel, example: TokenExample) -> list[torch.Tensor]:
    """Each answer's log-prob by the model's own forward and its own eager attention."""
    model.set_attn_implementation("eager")
    try:
        scores = []
        for answer in example.answers:
            ids = torch.from_numpy(np.concatenate([example.prompt_ids, answer.ids])).long()[None].to(model.device)
            logps = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
            rows = torch.arange(len(example.prompt_ids) - 1, ids.shape[1] - 1, device=ids.device)
            scores.append(logps[rows, ids[0, rows + 1]].sum().cpu())
        return scores
    finally:
        model.set_attn_implementation(attention.NAME)
