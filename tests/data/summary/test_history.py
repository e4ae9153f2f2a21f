"""Rows of one conversation that part where the template prints an answer otherwise as history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.summary.workbench import pair, summary_of, write
from tests.data.tiny_tokenizers import REWRITING, byte_bpe
from tests.real_tokenizers import Unavailable, real_tokenizer
from tests.tiny import random_examples
from tuningfork.data.config import DataConfig
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.summary import history
from tuningfork.data.summary.cost import FirstSteps
from tuningfork.data.summary.history import ANSWERS, FEWEST, NEAR, find_parted, rewritten
from tuningfork.records import Source, TokenAnswer, TokenExample

ADDING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ 'Then: ' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like the models that always think: the thought is begun by the prompt, and history has none.
BEGUN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>' + '</think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
PLAIN = REWRITING.replace("{{ '<think></think>' }}", "")
FIRST, SECOND = "a" * 40, "b" * 50  # answers, in tokens of a byte each


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(said)]


def answer(said: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": said}]


CONVERSATION = [
    pair(turns("x" * 40), answer(FIRST), answer("no")),
    pair(turns("x" * 40, FIRST, "y" * 40), answer(SECOND), answer("no")),
    pair(turns("x" * 40, FIRST, "y" * 40, SECOND, "z"), answer("c"), answer("no")),
]


def example(row: int, prompt: list[int], *answers: list[int]) -> TokenExample:
    laid = tuple(TokenAnswer(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in answers)
    return TokenExample(Source("rows", row), np.array(prompt, np.int32), laid)


def found(folder: Path, template: str, rows: list[Any] = CONVERSATION, share: str = "tree", per_step: int = 3) -> Any:
    tokenizer = byte_bpe(chat_template=template, eos="<|im_end|>")
    return summary_of(
        folder, rows, tokenizer=tokenizer, template="chat", max_length=500, share=share, per_step=per_step
    )  # type: ignore[arg-type]


def test_an_empty_thought_that_history_drops(tmp_path: Path) -> None:
    """Rows 2 and 3 go on from an answer; 40 and 50 tokens and their end tokens are laid twice."""
    summary = found(tmp_path, REWRITING)
    parted = summary.cost.parted
    assert parted is not None and (parted.count, [row.row for row in parted.rows]) == (2, [2, 3])
    assert (parted.left_out, parted.added) == ("<think></think>", "")
    assert (parted.tokens, parted.tokens_together) == (41 + 51, 41 + 51)
    [finding] = [finding for finding in summary.findings if finding.kind == "history"]
    assert not finding.strict and finding.count == 2
    trees = summary.cost.layout("trees").tokens
    assert finding.text == (
        "train.jsonl: 2 rows go on from another row's answer, but the chat template prints that answer otherwise as "
        'history (leaves out "<think></think>"), so the two part at its start and the answer is laid twice. Of an '
        f"epoch's tokens this costs 92 of {trees} in the run's order, and 92 of {trees} if all rows that begin alike "
        "lay together. No result is wrong for it: a template that prints history as it prints answers is only faster"
    )


def test_what_it_costs_is_what_a_template_without_it_saves(tmp_path: Path) -> None:
    """The same rows by a template with no thought: fewer tokens by those laid twice and by the thoughts themselves, of
    which each row has one, that its two answers share."""
    trees = {template: found(tmp_path, template).cost.layout("trees").tokens for template in (REWRITING, PLAIN)}
    assert trees[REWRITING] - trees[PLAIN] == 92 + 3 * len("<think></think>")


def test_in_steps_that_hold_one_row_nothing_is_lost_but_together_it_is(tmp_path: Path) -> None:
    parted = found(tmp_path, REWRITING, per_step=1).cost.parted
    assert (parted.count, parted.tokens, parted.tokens_together) == (2, 0, 92)


@pytest.mark.parametrize("share", ["prompt", "none"])
def test_nothing_is_said_where_no_trees_are_laid(tmp_path: Path, share: str) -> None:
    assert found(tmp_path, REWRITING, share=share).cost.parted is None


def test_a_template_that_prints_history_as_it_prints_answers(tmp_path: Path) -> None:
    summary = found(tmp_path, PLAIN)
    assert summary.cost.parted is None and "history" not in {finding.kind for finding in summary.findings}
    assert summary.cost.layout("trees").common_answer == 41 + 51


def test_words_that_history_adds(tmp_path: Path) -> None:
    parted = found(tmp_path, ADDING).cost.parted
    assert (parted.left_out, parted.added, parted.count) == ("", "Then: ", 2)
    assert parted.tokens == 41 + 51


def test_a_thought_that_the_prompt_begins(tmp_path: Path) -> None:
    """The rows part within the earlier one's prompt, 7 tokens before its end."""
    parted = found(tmp_path, BEGUN).cost.parted
    assert (parted.left_out, parted.count, parted.tokens) == ("<think></think>", 2, 41 + 51)


PROMPT, ANSWER, USER = list(range(100, 140)), list(range(200, 220)), list(range(300, 320))


def test_other_answers_to_the_same_prompt_are_no_history() -> None:
    """A row goes on from the second answer as it is, though the first ends alike; or from none of them."""
    rows = [example(1, PROMPT, [7, *ANSWER]), example(2, PROMPT, ANSWER), example(3, [*PROMPT, *ANSWER, *USER], [1])]
    assert rewritten(rows) == {}
    assert [*rewritten([rows[0], rows[2]])] == [1]
    other = example(3, [*PROMPT, 8, *ANSWER, *USER], [1])  # another first word: an answer of its own
    assert rewritten([rows[0], other]) == {}
    assert rewritten(random_examples([(40, (20, 20)), (90, (5,))])) == {}


def test_what_an_answer_is_known_by() -> None:
    """All of what is left of it comes again, FEWEST tokens at least, and it parts near the answer's start."""

    def parts(said: list[int], history: list[int]) -> bool:
        return bool(rewritten([example(1, PROMPT, said), example(2, [*PROMPT, *history, *USER], [1])]))

    assert parts([7, *ANSWER[:FEWEST]], ANSWER[:FEWEST]) and not parts([7, *ANSWER[: FEWEST - 1]], ANSWER[: FEWEST - 1])
    assert not parts([7, *ANSWER], ANSWER[:-1])  # history ends it otherwise, too
    long = list(range(400, 440))
    assert parts([7, *long], long) and not parts([7, *long], [*long[:20], 9, *long[21:]])  # nor in its middle
    assert parts([*long[:NEAR], 7, *ANSWER], [*long[:NEAR], *ANSWER])
    assert not parts([*long[: NEAR + 1], 7, *ANSWER], [*long[: NEAR + 1], *ANSWER])
    thought = list(range(1000, 1500))  # however much is left out
    assert parts([*thought, *ANSWER], ANSWER) and parts(ANSWER, [*long[:NEAR], *ANSWER])
    assert not parts(ANSWER, [*long[: NEAR + 1], *ANSWER])


def test_the_longest_conversation_counts() -> None:
    """Row 3 goes on from row 2's answer as it is; that row 1's answer lies in its history in other words is row 2's."""
    second = [*PROMPT, *ANSWER, *USER]
    rows = [example(1, PROMPT, [7, *ANSWER]), example(2, second, USER), example(3, [*second, *USER, *USER], [1])]
    assert {place: one.example for place, one in rewritten(rows).items()} == {1: 0}


def test_qwen3s_own_template(tmp_path: Path) -> None:
    """Its last answer has an empty thought, its history none."""
    try:
        tokenizer = real_tokenizer("qwen3")
    except Unavailable as error:
        pytest.skip(str(error))
    said = " ".join(f"The answer is {n}." for n in range(20))
    rows = [
        pair(turns("How many?"), answer(said), answer("No.")),
        pair(turns("How many?", said, "And?"), answer("No more."), answer("Yes.")),
    ]
    config = DataConfig(write(tmp_path / "rows.jsonl", rows), max_length=1000)
    examples, _ = prepare_examples(config.train, tokenizer, config, len(tokenizer))
    [(place, one)] = rewritten(examples).items()
    first = examples[0].answers[0].ids
    assert (place, one.example, one.answer, one.at) == (1, 0, 0, len(examples[0].prompt_ids))
    assert tokenizer.decode(first[: one.left_out]) == "<think>\n\n</think>\n\n" and len(one.added) == 0
    again = examples[1].prompt_ids[one.at :]
    assert np.array_equal(first[one.left_out :], again[: len(first) - one.left_out])


def test_short_questions_to_the_same_instructions_are_compared_with_their_own_history_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the last tokens of 60 prompts are what the longer ones begin with: 30 conversations of two turns."""
    instructions, rows = list(range(400, 500)), []
    for n in range(30):
        first, words = [*instructions, 1000 + n, *range(2000, 2001 + n % 10)], [*range(50 * n, 50 * n + 20)]
        rows += [example(1 + n, first, [7, *words]), example(31 + n, [*first, *words, 5000 + n], [3] * 20)]
    compared: list[int] = []
    real = history.in_common
    monkeypatch.setattr(history, "in_common", lambda one, other: compared.append(1) or real(one, other))
    found = rewritten(rows)
    assert {place: one.example for place, one in found.items()} == {place + 1: place for place in range(0, 60, 2)}
    assert len(compared) == 30


def test_of_very_many_alike_conversations_each_is_found_by_its_own_question() -> None:
    """Questions shorter than NEAR, and answers that all end in the same words."""
    instructions, rows = list(range(400, 440)), []
    count = 2 * ANSWERS
    for n in range(count):
        first, words = [*instructions, 1000 + n, *range(2000, 2001 + n % 10)], [5000 + n, *ANSWER]
        rows += [example(1 + n, first, [7, *words]), example(1 + count + n, [*first, *words, *USER], [3] * 20)]
    assert {place: one.example for place, one in rewritten(rows).items()} == {
        place + 1: place for place in range(0, 2 * count, 2)
    }


def test_what_costs_nothing_in_one_of_the_orders_is_no_negative_cost_there() -> None:
    """A prompt has the end of an answer which other rows, in another step, go on from as it is."""
    steps: list[list[TokenExample]] = [[], []]
    for rules, end in ([1] * 50, [3] * 40), ([2] * 50, [3] * 20):  # more and fewer tokens than a cut must save
        answer = [*range(100, 140), *end]
        steps[0] += [example(1, [*rules, 4], answer), example(2, [*rules, *end, 5], [6])]
        steps[1] += [example(row, [*rules, 4], [*answer, row]) for row in (7, 8)]
    limits = PackLimits.plan(1024, "tree", compiled=False)
    parted = find_parted(FirstSteps(steps), 8, limits, byte_bpe())
    assert parted is not None and (parted.count, parted.tokens, parted.tokens_together) == (2, 40, 0)
