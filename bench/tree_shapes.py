"""Data whose examples begin alike, with random tokens: agent turns, trajectories, rankings; and pairs that do not.

Sizes are those of public files, in tokens of Qwen3's vocabulary: tau-bench airline (a row a turn; trajectories) and
RM-Bench code (three chosen and three rejected answers to a prompt, nine pairs). Examples of a group lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product

import numpy as np

from tuningfork.records import Source, TokenAnswer, TokenExample

Draw = Callable[[int], np.ndarray]


def turns(vocabulary: int, conversations: int, stem: int = 4000, seed: int = 0) -> list[list[TokenExample]]:
    """An example for each turn of an agent, with all that came before as its prompt; a group for each conversation.

    All have the same system prompt and tools, `stem` tokens. A turn is an answer of 47 tokens in the middle, and what
    the user or a tool then says, 177.
    """
    draw, rng, row = _draw(vocabulary, seed), np.random.default_rng(seed + 1), count(1)
    common = draw(stem)

    def conversation() -> Iterator[TokenExample]:
        history = np.concatenate([common, draw(60)])
        for _ in range(int(rng.integers(6, 20))):
            answer = draw(int(rng.integers(20, 75)))
            yield _example(next(row), history, answer)
            history = np.concatenate([history, answer, draw(int(rng.integers(60, 300)))])

    return [list(conversation()) for _ in range(conversations)]


def trajectories(vocabulary: int, examples: int, length: int = 2443, seed: int = 0) -> list[list[TokenExample]]:
    """Whole runs of an agent as answers to one prompt of 3,877 tokens, system prompt and tools; four a task.

    Answers have `length` tokens on average.
    """
    draw, rng, row = _draw(vocabulary, seed), np.random.default_rng(seed + 1), count(1)
    stem = draw(3800)

    def task() -> list[TokenExample]:
        prompt = np.concatenate([stem, draw(77)])
        return [_example(next(row), prompt, draw(int(rng.integers(length // 2, 3 * length // 2)))) for _ in range(4)]

    return [task() for _ in range(examples // 4)]


def rankings(vocabulary: int, prompts: int, seed: int = 0) -> list[list[TokenExample]]:
    """Nine pairs a prompt: each of three chosen answers with each of three rejected ones, 444 tokens on average."""
    draw, rng, row = _draw(vocabulary, seed), np.random.default_rng(seed + 1), count(1)

    def ranking() -> list[TokenExample]:
        prompt = draw(int(rng.integers(60, 240)))
        chosen, rejected = ([draw(int(rng.integers(250, 640))) for _ in range(3)] for _ in range(2))
        return [_example(next(row), prompt, *pair) for pair in product(chosen, rejected)]

    return [ranking() for _ in range(prompts)]


def _draw(vocabulary: int, seed: int) -> Draw:
    integers = np.random.default_rng(seed).integers
    return lambda size: integers(0, vocabulary, size).astype(np.int32)


def _example(row: int, prompt: np.ndarray, *answers: np.ndarray) -> TokenExample:
    counted = tuple(TokenAnswer(ids, np.ones(len(ids), dtype=bool)) for ids in answers)
    return TokenExample(Source("trees", row), prompt, counted)
