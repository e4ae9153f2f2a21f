"""What becomes of an example that is longer than the limit: left out, cut the same way for all of its answers, or, of a
document, cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tuningfork.accounts import Size
from tuningfork.data.examples.values import Unusable
from tuningfork.records import TokenAnswer, TokenExample

OverLength = Literal["drop", "truncate_answers", "truncate_prompt_left", "pieces", "stream"]

CUT_ANSWERS = "answers cut at max_length"
CUT_ONE_SIDE = "some of its answers cut, and without their end, others not"
CUT_PROMPT = "prompt cut at the front"
CUT_PIECES = "cut into pieces of max_length"


def size_of(example: TokenExample, bos: int | None) -> Size:
    """How long an example is, and how much of its beginning no cut takes."""
    opens = bos is not None and len(example.prompt_ids) > 0 and example.prompt_ids[0] == bos
    return Size(len(example.prompt_ids), tuple(len(answer.ids) for answer in example.answers), int(opens))


def truncate(
    example: TokenExample, max_length: int, policy: OverLength, bos: int | None, names: Sequence[str] = ()
) -> tuple[TokenExample, tuple[str, ...]]:
    """The example with no sequence (prompt + answer) longer than `max_length` tokens, and what was done to it.

    drop, pieces            a longer example is Unusable; `pieces_of` cuts documents
    truncate_answers        answers end where max_length is reached, every one of them by the same rule; a cut one has
                            no end marker, so it does not teach to stop
    truncate_prompt_left    the prompt loses as many of its first tokens as the longest answer needs, and keeps one;
                            a BOS in front of it stays, once

    `names` are those that the file has for the answers, for what is said of a dropped one.

    Raises:
        Unusable: the example is too long and is not to be cut, or cutting would leave a side empty.
    """
    over = example.longest - max_length
    if over <= 0:
        return example, ()
    prompt, answers = example.prompt_ids, example.answers
    size = _size(example, max_length, names or [f"answer {place}" for place in range(len(answers))])
    if policy in ("drop", "pieces"):
        raise Unusable("longer than max_length", size)
    if policy == "truncate_answers":
        room = max_length - len(prompt)
        if room < 1:
            raise Unusable("prompt leaves no room for an answer", size)
        cut = [len(answer.ids) > room for answer in answers]
        shorter = tuple(TokenAnswer(answer.ids[:room], answer.mask[:room]) for answer in answers)
        return replace(example, answers=shorter), (CUT_ANSWERS,) if all(cut) else (CUT_ANSWERS, CUT_ONE_SIDE)
    kept = len(prompt) - over
    opening = size_of(example, bos).opening
    if kept <= opening:
        raise Unusable("answer leaves no room for the prompt", size)
    left = prompt[len(prompt) - kept + opening :]
    if left[0] != bos:  # BOS may open every turn, and the cut fall in front of one
        left = np.concatenate([prompt[:opening], left])
    return replace(example, prompt_ids=left), (CUT_PROMPT,)


def can_be_pieces(example: TokenExample) -> bool:
    """Whether an example is one text, with nothing in front of it but perhaps a BOS."""
    return len(example.answers) == 1 and len(example.prompt_ids) <= 1


def pieces_of(example: TokenExample, max_length: int) -> list[TokenExample]:
    """Consecutive pieces of a document that is longer than `max_length` tokens, of which each has at most as many.

    A piece begins with the last token of the one before, which predicts its first and counts there alone. So each
    token of the document that has a predictor is predicted once, and the tokens that count, piece behind piece, are
    those of the document.
    """
    [answer] = example.answers
    p, step = len(example.prompt_ids), max_length - 1
    first = replace(example, answers=(TokenAnswer(answer.ids[: max_length - p], answer.mask[: max_length - p]),))
    found = [replace(first, source=replace(example.source, piece=1))]
    for start in range(step - p, len(answer.ids) - 1, step):
        ids, mask = answer.ids[start : start + max_length], answer.mask[start : start + max_length].copy()
        mask[0] = False
        source = replace(example.source, piece=len(found) + 1)
        found.append(replace(example, source=source, prompt_ids=ids[:0], answers=(TokenAnswer(ids, mask),)))
    return found


def _size(example: TokenExample, max_length: int, names: Sequence[str]) -> str:
    """How many tokens there are, and which answers are too long with the prompt."""
    prompt = len(example.prompt_ids)
    sizes = [(name, len(answer.ids)) for name, answer in zip(names, example.answers, strict=True)]
    lengths = " and ".join(f"{name} {size}" for name, size in sizes)
    over = " and ".join(name for name, size in sizes if prompt + size > max_length)
    return f"prompt {prompt}, {lengths} tokens, too long with {over}; data.max_length is {max_length}"
