"""Documents joined into one stream that is cut at max_length, as many trainers do it.

Documents within a piece see one another, and where a document begins nothing says so to attention. That is for
comparison with such trainers; `pieces_of` in truncate.py keeps documents apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tuningfork.data.examples.values import Unusable
from tuningfork.data.token_table import Columns, columns_of
from tuningfork.data.tokens.truncate import can_be_pieces
from tuningfork.records import Source, TokenAnswer, TokenExample

JOINED = "joined into a stream, where documents of a piece see one another"
NO_DOCUMENT = "no document, which data.over_length stream could join"


def check_can_be_joined(example: TokenExample) -> None:
    """Raise Unusable where an example is more than a text, all of which counts as much as others do."""
    if not can_be_pieces(example):
        raise Unusable(NO_DOCUMENT, "it has a prompt, or several answers")
    if not example.answers[0].mask.all():
        raise Unusable(NO_DOCUMENT, "some of its tokens do not count")
    if example.label is not None or example.margin is not None or example.weight != 1:
        raise Unusable(NO_DOCUMENT, "it has a label, a margin or a weight of its own")


def pieces_of_stream(blocks: Iterable[tuple[Columns, np.ndarray]], max_length: int) -> Iterator[Columns]:
    """Pieces of at most `max_length` tokens of a table's documents, one behind the other as one text.

    A piece begins with the last token of the one before, which predicts its first. So every token of the stream but
    the first is a target once, BOS in front of a document too; only the last piece may be shorter. A piece is named
    by the row of its first target and its number in the stream.

    Args:
        blocks: columns of whole documents, and the bytes of text of each of their tokens, int64 [L].

    Yields:
        The columns of pieces that are whole by then, block by block.
    """
    held = tuple(np.zeros(0, np.int64) for _ in range(3))  # ids, rows and widths of tokens of no piece until now
    made = 0
    for columns, widths in blocks:
        rows = np.repeat(columns["row"], columns["prompt"] + columns["answer"])
        held = tuple(np.concatenate(pair) for pair in zip(held, (columns["ids"], rows, widths), strict=True))
        starts = range(0, len(held[0]) - max_length + 1, max_length - 1)
        yield _pieces(held, starts, max_length, made)
        made += len(starts)
        held = tuple(values[len(starts) * (max_length - 1) :] for values in held)
    if len(held[0]) > 1:  # or it is the last token of the last piece
        yield _pieces(held, range(1), max_length, made)


def _pieces(stream: tuple[np.ndarray, ...], starts: range, length: int, made: int) -> Columns:
    found = []
    for number, start in enumerate(starts, start=made + 1):
        ids, rows, widths = (values[start : start + length] for values in stream)
        counts = np.ones(len(ids), bool)
        counts[0] = False  # it has no predictor, or counts in the piece before
        answer = TokenAnswer(ids.astype(np.int32), counts, int(widths[1:].sum()))
        found.append(TokenExample(Source("", int(rows[1]), number), answer.ids[:0], (answer,)))
    return columns_of(found)
