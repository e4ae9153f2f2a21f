"""Rows of one conversation that share less than they could: the chat template prints an answer otherwise as history.

Some templates drop from history what they print in an answer, such as an empty thought (Qwen3's). The row of a later
turn then has other tokens from that answer's start on than the row of the turn itself, and trees lay the answer twice.
Only tokens are looked at: whatever the template does, they decide what is laid once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

from tuningfork.data.packing.pack import PackLimits, windows_of
from tuningfork.data.packing.tree import in_common
from tuningfork.data.summary.cost import FirstSteps, beginning
from tuningfork.data.summary.layouts import Parted
from tuningfork.records import TokenAnswer, TokenExample

NEAR = 16  # tokens around an answer's start within which history leaves it, and at most so many that history adds
FEWEST = 8  # tokens of an answer that come again in history, to know it by
ANSWERS = 64  # that may be a row's history and are looked at; of more, those of the longest prompts
CUTS = (0, 4, NEAR)  # so many last tokens of a prompt may be otherwise: few first, for they tell who asked what
SHOWN = 5  # rows named
PIECE = 24  # tokens shown of what history leaves out
_BASE = 0x9E3779B97F4A7C15  # odd, of 64 bits: each token of an end changes its hash


class _Answer(NamedTuple):
    """One of an example's answers."""

    prompt: int  # tokens of its prompt
    example: int
    answer: int


class Rewritten(NamedTuple):
    """How history has an answer: `added` in place of `left_out` tokens, from the sequence's position `at` on."""

    example: int
    answer: int
    at: int
    left_out: int
    added: np.ndarray


def find_parted(
    steps: FirstSteps, examples_of_epoch: int, limits: PackLimits, tokenizer: PreTrainedTokenizerBase
) -> Parted | None:
    """The rows among these steps' examples, and the tokens that are laid because of them; None if there are none, or
    if trees are no larger for them.

    The tokens are counted by packing the examples once more, with each such answer as history has it, and what history
    leaves out beside it, so that no token is gone. Where these take more, as the answer shared more, it is 0.
    """
    examples = steps.examples
    found = rewritten(examples)
    if not found:
        return None
    alike = steps.changed(_as_in_history(examples, found.values(), limits))
    tokens = steps.packed(limits).used - alike.packed(limits).used
    together = steps.packed_together(limits).used - alike.packed_together(limits).used
    if tokens <= 0 and together <= 0:
        return None
    left_out, added = Counter(_piece(examples, one) for one in found.values()).most_common(1)[0][0]
    rows = sorted((examples[place].source for place in found), key=lambda row: (row.file, row.row))

    def of_epoch(number: int) -> int:
        return round(number * examples_of_epoch / len(examples))

    return Parted(
        count=of_epoch(len(rows)),
        rows=rows[:SHOWN],
        left_out=str(tokenizer.decode(list(left_out))),
        added=str(tokenizer.decode(list(added))),
        tokens=of_epoch(max(tokens, 0)),
        tokens_together=of_epoch(max(together, 0)),
    )


def rewritten(examples: Sequence[TokenExample]) -> dict[int, Rewritten]:
    """Of each example that goes on from an answer which its history has in other words: that answer.

    It goes on from the one whose prompt is the longest that its own prompt begins with, but for the last tokens before
    the answer, which a template may print otherwise as well: none of them if there is such a prompt, else NEAR at most.
    Of prompts that are the same instructions with short questions, each begins as any other does but for so many
    tokens, so no more than ANSWERS of these are looked at. One that goes on from some answer as it is counts
    as no such row, whatever it has in common with other answers to the same prompt.
    """
    found: dict[int, Rewritten] = {}
    order = sorted(range(len(examples)), key=lambda place: beginning(examples[place]))
    start = 0
    for window in windows_of([examples[place] for place in order]):
        places = order[start : start + len(window)]
        start += len(window)
        groups: dict[bytes, list[int]] = defaultdict(list)  # places of each prompt, by its tokens
        for place in places:
            groups[examples[place].prompt_ids.astype(">u4").tobytes()].append(place)
        settled: set[int] = set()  # the first place of each prompt for which it is known
        for cut in CUTS:
            for later, earlier in _followed(examples, groups, cut, settled):
                known, one = _nearest(examples, earlier, examples[later[0]].prompt_ids)
                if known:
                    settled.add(later[0])
                if one is not None:
                    found.update(dict.fromkeys(later, one))
    return found


def _followed(
    examples: Sequence[TokenExample], groups: Mapping[bytes, list[int]], cut: int, settled: Set[int]
) -> Iterator[tuple[list[int], list[_Answer]]]:
    """The examples of each prompt, and answers that it may go on from, those of the longest prompts first; not of
    prompts whose first example is `settled`.

    It is longer than their prompts, begins as these do but for their last `cut` tokens, and has the end of the answer
    where that could be history.
    """
    entries = sorted([(_stem(prompt, cut), False, prompt) for prompt in groups] + [(p, True, p) for p in groups])
    opened: list[tuple[bytes, list[int]]] = []  # stems that the present entry begins with, and the ends opened there
    known: dict[int, list[_Answer]] = defaultdict(list)  # by their ends: answers to the prompts of these stems
    for key, whole, prompt in entries:
        while opened and not key.startswith(opened[-1][0]):
            for end in opened.pop()[1]:
                known[end].pop()
        if whole and groups[prompt][0] in settled:
            continue
        if whole:
            begun = max(len(opened[0][0]) // 4 - NEAR, 0)  # no answer begins before
            ends_here = _ends(examples[groups[prompt][0]].prompt_ids[begun:])
            last = {end: at for at, end in enumerate(ends_here, begun)}  # where each comes last
            earlier = [
                one
                for end, at in last.items()
                for one in known.get(end, [])[-ANSWERS:]  # of the longest prompts, as each begins as those before do
                if one.prompt < len(prompt) // 4 and one.prompt - NEAR <= at
            ]
            if earlier:
                yield groups[prompt], sorted(earlier, key=lambda one: (-one.prompt, one))[:ANSWERS]
        else:
            answers = [pair for place in groups[prompt] for pair in _answers(examples[place], place)]
            for end, one in answers:
                known[end].append(one)
            opened.append((key, [end for end, _ in answers]))


def _answers(example: TokenExample, place: int) -> Iterator[tuple[int, _Answer]]:
    """An example's answers, and how their sequences end; none of a sequence shorter than an end."""
    for number, answer in enumerate(example.answers):
        last = np.concatenate([example.prompt_ids[-FEWEST:], answer.ids])[-FEWEST:]
        for end in _ends(last):
            yield end, _Answer(len(example.prompt_ids), place, number)


def _ends(ids: np.ndarray) -> list[int]:
    """A hash of each FEWEST tokens side by side; none if there are fewer."""
    if len(ids) < FEWEST:
        return []
    powers = np.array([pow(_BASE, n, 1 << 64) for n in range(FEWEST)], np.uint64)
    hashes: list[int] = (sliding_window_view(ids.astype(np.uint64), FEWEST) * powers).sum(axis=1).tolist()
    return hashes


def _stem(prompt: bytes, cut: int) -> bytes:
    """A prompt without its last `cut` tokens, or half of a short one."""
    tokens = len(prompt) // 4
    return prompt[: 4 * (tokens - min(cut, tokens // 2))]


def _nearest(
    examples: Sequence[TokenExample], earlier: Sequence[_Answer], later: np.ndarray
) -> tuple[bool, Rewritten | None]:
    """Whether a prompt goes on from one of these answers, and from which if it does so in other words."""
    first: Rewritten | None = None
    for prompt, place, answer in earlier:
        if first is not None and prompt < len(examples[first.example].prompt_ids):
            break
        sequence = np.concatenate([examples[place].prompt_ids, examples[place].answers[answer].ids])
        at = in_common(sequence, later)
        if at == len(sequence):
            return True, None
        if first is None and abs(at - prompt) <= NEAR:
            change = _change(sequence[at:], later[at:])
            first = change and Rewritten(place, answer, at, *change)
    return first is not None, first


def _change(answer: np.ndarray, history: np.ndarray) -> tuple[int, np.ndarray] | None:
    """How history begins with all the rest of an answer but for one piece: tokens left out of it, or tokens added."""
    nothing = history[:0]
    for left_out in np.flatnonzero(answer == history[0]).tolist() if len(history) else []:
        rest = answer[left_out:]
        if len(rest) >= FEWEST and np.array_equal(rest, history[: len(rest)]):
            return left_out, nothing
    for added in range(1, NEAR + 1) if len(answer) >= FEWEST else []:
        if np.array_equal(answer, history[added : added + len(answer)]):
            return 0, history[:added]
    return None


def _as_in_history(
    examples: Sequence[TokenExample], found: Iterable[Rewritten], limits: PackLimits
) -> dict[int, TokenExample]:
    """The examples whose answers history has in other words, with these words for theirs; but for those that would no
    longer fit a pack."""
    changed: dict[int, dict[int, Rewritten]] = defaultdict(dict)
    for one in found:
        changed[one.example][one.answer] = one
    new = {place: _with(examples[place], by_answer) for place, by_answer in changed.items()}
    return {place: example for place, example in new.items() if example.unique_tokens <= limits.tokens}


def _with(example: TokenExample, changes: dict[int, Rewritten]) -> TokenExample:
    # The prompt's end may be among what changes.
    p = min(len(example.prompt_ids), *(one.at for one in changes.values()))
    sequences = [np.concatenate([example.prompt_ids, answer.ids]) for answer in example.answers]
    for place, one in changes.items():
        ids = sequences[place]
        sequences[place] = np.concatenate([ids[: one.at], one.added, ids[one.at + one.left_out :]])
        if one.left_out:
            sequences.append(ids[: one.at + one.left_out])
    answers = tuple(TokenAnswer(ids[p:], np.ones(len(ids) - p, bool)) for ids in sequences)
    return replace(example, prompt_ids=example.prompt_ids[:p], answers=answers)


def _piece(examples: Sequence[TokenExample], one: Rewritten) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that history leaves out of an answer, and those that it adds."""
    example = examples[one.example]
    ids = np.concatenate([example.prompt_ids, example.answers[one.answer].ids])
    return tuple(ids[one.at : one.at + min(one.left_out, PIECE)].tolist()), tuple(one.added[:PIECE].tolist())
