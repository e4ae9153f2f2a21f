"""Over-length examples: what each policy leaves, to the token, with counts worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.truncate import (
    CUT_ANSWERS,
    CUT_ONE_SIDE,
    CUT_PROMPT,
    OverLength,
    can_be_pieces,
    pieces_of,
    truncate,
)
from tuningfork.records import Source, TokenAnswer, TokenExample

BOS = 1


def example(prompt: int, *answers: int, bos: bool = False) -> TokenExample:
    """Prompt ids 10, 11, ..; answer ids 50, 51, .. and 90 for the end, all of them counted."""
    ids = [BOS, *range(11, 10 + prompt)] if bos else list(range(10, 10 + prompt))
    made = ([*range(50, 49 + n), 90] for n in answers)
    counted = tuple(TokenAnswer(np.array(a, np.int32), np.ones(len(a), bool)) for a in made)
    return TokenExample(Source("f", 3), np.array(ids, np.int32), counted)


def ids(made: TokenExample) -> list[list[int]]:
    return [made.prompt_ids.tolist(), *(answer.ids.tolist() for answer in made.answers)]


@pytest.mark.parametrize("policy", ["drop", "truncate_answers", "truncate_prompt_left"])
def test_what_fits_stays_as_it_is(policy: OverLength) -> None:
    given = example(6, 4, 3)
    assert truncate(given, 10, policy, BOS) == (given, ())


def test_drop() -> None:
    with pytest.raises(Unusable) as caught:
        truncate(example(6, 4, 5), 10, "drop", BOS)
    assert caught.value.args == (
        "longer than max_length",
        "prompt 6, answer 0 4 and answer 1 5 tokens, too long with answer 1; data.max_length is 10",
    )


def test_what_is_too_long_goes_by_its_name_in_the_file() -> None:
    with pytest.raises(Unusable, match=r"answers\[2\] 3 and answers\[0\] 9 and answers\[1\] 5 tokens, too long with "
                       r"answers\[0\] and answers\[1\];"):  # fmt: skip
        truncate(example(6, 3, 9, 5), 10, "drop", BOS, ["answers[2]", "answers[0]", "answers[1]"])


def test_a_prompt_is_cut_by_no_more_than_is_needed() -> None:
    """Prompt 6, answer 5, limit 10: one token has to go."""
    made, notes = truncate(example(6, 3, 5), 10, "truncate_prompt_left", BOS)
    assert ids(made)[0] == [11, 12, 13, 14, 15] and notes == (CUT_PROMPT,)
    assert ids(made)[1:] == [[50, 51, 90], [50, 51, 52, 53, 90]] and made.longest == 10


def test_a_cut_prompt_keeps_its_bos_and_has_it_once() -> None:
    made, _ = truncate(example(6, 3, 6, bos=True), 10, "truncate_prompt_left", BOS)
    assert ids(made)[0] == [BOS, 13, 14, 15]
    same, _ = truncate(example(6, 3, 6, bos=True), 10, "truncate_prompt_left", None)  # no BOS that anyone knows of
    assert ids(same)[0] == [12, 13, 14, 15]
    with pytest.raises(Unusable, match="answer leaves no room for the prompt"):
        truncate(example(6, 3, 9, bos=True), 10, "truncate_prompt_left", BOS)
    assert ids(truncate(example(6, 3, 9), 10, "truncate_prompt_left", BOS)[0])[0] == [15]


def test_a_cut_in_front_of_a_bos_does_not_double_it() -> None:
    """Where BOS opens every turn; what stays is one token shorter than it could be."""
    given = replace(example(6, 3, 6), prompt_ids=np.array([BOS, 11, 12, BOS, 14, 15], np.int32))
    made, _ = truncate(given, 10, "truncate_prompt_left", BOS)
    assert ids(made)[0] == [BOS, 14, 15]
    longer, _ = truncate(given, 11, "truncate_prompt_left", BOS)
    assert ids(longer)[0] == [BOS, 12, BOS, 14, 15]


def test_a_prompt_of_the_limit_or_longer() -> None:
    for policy in ("truncate_answers", "drop"):
        with pytest.raises(Unusable):
            truncate(example(10, 3, 3), 10, policy, BOS)  # type: ignore[arg-type]
    made, _ = truncate(example(30, 3, 3), 10, "truncate_prompt_left", BOS)
    assert ids(made)[0] == list(range(33, 40))


def test_answers_are_cut_at_one_length_and_asymmetry_is_said() -> None:
    made, notes = truncate(example(6, 3, 9), 10, "truncate_answers", BOS)
    assert ids(made)[1:] == [[50, 51, 90], [50, 51, 52, 53]]
    assert notes == (CUT_ANSWERS, CUT_ONE_SIDE)
    made, notes = truncate(example(6, 5, 9), 10, "truncate_answers", BOS)
    assert ids(made)[1:] == [[50, 51, 52, 53]] * 2 and notes == (CUT_ANSWERS,)
    assert all(len(a.mask) == len(a.ids) for a in made.answers)


# ---- documents in pieces


def document(tokens: int, bos: bool) -> TokenExample:
    """One text of ids 50, 51, .. and 90 for its end, perhaps behind a BOS."""
    made = example(0, tokens)
    return replace(made, prompt_ids=np.array([BOS], np.int32)) if bos else made


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("tokens", [11, 12, 13, 20, 28])
def test_pieces_predict_each_token_of_a_document_once_and_in_order(tokens: int, limit: int, bos: bool) -> None:
    """Also the first behind a cut, from the one before it. No piece is longer than the limit, and all but the last are
    as long."""
    whole = document(tokens, bos)
    pieces = pieces_of(whole, limit)
    text = [*whole.prompt_ids.tolist(), *whole.answers[0].ids.tolist()]
    targets = []
    for piece in pieces:
        ids, start = [*piece.prompt_ids.tolist(), *piece.answers[0].ids.tolist()], len(targets)
        assert ids == text[start : start + limit]
        counted = piece.answers[0].ids[piece.answers[0].mask].tolist()
        targets += counted[1:] if not bos and piece is pieces[0] else counted
        assert piece.answer_tokens(0) == len(ids) - 1
    assert targets == text[1:]
    assert [piece.longest for piece in pieces[:-1]] == [limit] * (len(pieces) - 1)
    assert 2 <= pieces[-1].longest <= limit
    assert [str(piece.source) for piece in pieces] == [f"f:3 piece {n}" for n in range(1, len(pieces) + 1)]


def test_only_documents_are_cut_into_pieces() -> None:
    assert can_be_pieces(document(5, bos=False)) and can_be_pieces(document(5, bos=True))
    assert not can_be_pieces(example(2, 5)) and not can_be_pieces(example(0, 5, 6))
    with pytest.raises(Unusable, match="longer than max_length"):
        truncate(example(6, 5), 10, "pieces", BOS)
