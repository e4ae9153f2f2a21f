"""The head: answer log-probs from hidden states in one pass, without ever holding all logits.

Logit rows are cut into chunks of whole examples: of whole groups of those that share logit rows. A chunk's logits
Z = H Wᵀ + b give the answers' log-probs; those few numbers give the loss and its gradient, since the reference is
cached; the gradient of Z is multiplied out at once. That is exact, costs 6·R·V·D flops with backward included, and
recomputes nothing. Only a group with more rows than a chunk takes a second product: its log-probs first, then its
gradient. And that only where the loss bends: the gradient of a weighted sum of log-probs is known before they are.

A logit row that several answers share is projected once. Each of them adds its log-prob up, and its gradient is the sum
of theirs.

Logits are float32 at least, whatever the factors' dtype: a matrix unit adds bfloat16 products up in float32, and to
round that to bfloat16 costs tenths of a nat on an answer of a few hundred tokens. Only the gradient of Z is rounded to
the factors' dtype, as any gradient between two products is.

Answer log-probs are sums over tokens in fixed point: integer addition is associative, so an answer gets the same bits
whatever chunk, pack or order its rows come in, and whoever shares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tuningfork.kernels.select import Kernels
from tuningfork.kernels.sums import sum_by_answer, sum_by_place
from tuningfork.models.sink import WHOLE, Gradient, Vocabulary, product
from tuningfork.models.split_k import without_split_k
from tuningfork.ranges import phase
from tuningfork.records import ChunkLoss, LogitTransform, PackedBatch


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection's settings for a run."""

    kernels: Kernels
    transform: LogitTransform
    chunk_rows: int

    def score(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: PackedBatch,
        bias: Tensor | None = None,
        vocabulary: Vocabulary = WHOLE,
    ) -> Tensor:
        """Summed log-probs of each answer of a pack, float64 [A]. No gradient.

        Args:
            hidden: [R, D], final hidden states of the pack's logit rows.
            weight: [V, D]; cast to the dtype of `hidden`.
            bias: [V], added to the raw logits; most models have none.
            vocabulary: where V is a part of all tokens, which part.
        """
        with torch.no_grad():
            rows = hidden.to(_factor_dtype(hidden))
            projection = _Projection.of(weight, bias, rows.dtype)
            sums = [hidden.new_zeros(0, dtype=torch.float64)]
            for chunk in _chunks(batch, self.chunk_rows):
                row_logps = []
                for piece in self._pieces(rows, projection, batch, chunk, vocabulary):
                    row_logps.append(piece.logps)
                    piece.logits = None
                sums.append(chunk.by_answer(row_logps, batch))
            return torch.cat(sums)

    def backward(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: PackedBatch,
        loss: ChunkLoss,
        bias: Tensor | None = None,
        vocabulary: Vocabulary = WHOLE,
        gradients: tuple[Gradient, Gradient | None] | None = None,
        linear: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Take a pack's share of the loss and backpropagate it, into `.grad` of `weight` and `bias` and, through
        `hidden`, the model.

        The weight's gradient is added up in float32 or better by the matrix product itself, over the chunks of a pack
        and, where `weight.grad` has that precision, over the packs of a step.

        Args:
            gradients: where those of weight and bias are added up instead, of which each has its own.
            linear: the loss is a weighted sum of log-probs.

        Returns:
            `(loss, logps)`: float64 scalar; float64 [A], the same bits as `score` gives. Neither has a gradient.
        """
        with torch.no_grad():
            rows = hidden.detach().to(_factor_dtype(hidden))
            projection = _Projection.of(weight, bias, rows.dtype)
            d_rows = torch.zeros_like(rows)
            d_weight, d_bias = gradients or (Gradient(weight), None if bias is None else Gradient(bias))
            own_targets = vocabulary.own(batch.targets)
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            logps = []
            for chunk in _chunks(batch, self.chunk_rows):
                pieces: Iterable[_Piece] = self._pieces(rows, projection, batch, chunk, vocabulary)
                if linear:  # the gradient by any log-probs is that by those to come
                    sums = total.new_zeros(_size(chunk.answers))
                else:
                    pieces = [piece.kept(chunk) for piece in pieces]
                    sums = chunk.by_answer([piece.logps for piece in pieces], batch)
                share, d_sums = _differentiate(loss, chunk.answers, sums)
                d_logps = chunk.by_row(d_sums, batch)
                row_logps = []
                for piece in pieces:
                    logits = piece.logits if piece.logits is not None else projection.logits(rows[piece.rows])
                    d_logits = _as_factor(logits, rows.dtype)
                    self.kernels["row_logps"].logits_gradient(
                        logits,
                        own_targets[piece.rows],
                        piece.lse,
                        d_logps[chunk.within(piece.rows)].to(piece.lse.dtype),
                        self.transform,
                        d_logits,
                    )
                    torch.mm(d_logits, projection.weight, out=d_rows[piece.rows])
                    d_weight.add_outer(d_logits, rows[piece.rows])
                    if d_bias is not None:
                        d_bias.add_sum(d_logits)
                    row_logps.append(piece.logps)
                    piece.logits = None
                    del logits, d_logits  # before the next piece's are made
                if linear:
                    sums = chunk.by_answer(row_logps, batch)
                    share = loss(chunk.answers.start, chunk.answers.stop, sums)
                total += share
                logps.append(sums)
            del projection  # the model's backward pass is where memory is short
            d_weight.store()
            if d_bias is not None:
                d_bias.store()
            d_rows = vocabulary.summed(d_rows)
        with phase("backward"):
            hidden.backward(d_rows.to(hidden.dtype))
        return total, torch.cat([total.new_zeros(0), *logps])

    def _pieces(
        self, hidden: Tensor, projection: _Projection, batch: PackedBatch, chunk: _Chunk, vocabulary: Vocabulary
    ) -> Iterator[_Piece]:
        """A chunk's logit rows, as many at once as may be. `hidden` has the projection's dtype."""
        for start in range(chunk.rows.start, chunk.rows.stop, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, chunk.rows.stop))
            logits = projection.logits(hidden[rows])
            logps, lse = vocabulary.row_logps(self.kernels["row_logps"], logits, batch.targets[rows], self.transform)
            piece = _Piece(rows, logits, logps, lse)
            del logits  # whoever takes the piece decides how long they are kept
            yield piece


@dataclass(frozen=True, slots=True)
class _Projection:
    """The output embedding as a factor, for products whose bits do not depend on how many rows they have.

    A matrix library chooses its kernel, and so its order of addition, by shape and alignment. Rows are therefore
    rounded up, to a multiple of 128 on a GPU and of 4 on a CPU, and a GPU's vocabulary to one of 64; what is added is
    zero, and cut off again. Of a small vocabulary and few rows it might cut the sums, too: see split_k.py.
    """

    padded: Tensor  # [V', D]
    bias: Tensor | None  # [V]
    vocabulary: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> _Projection:
        padding = -len(weight) % 64 if weight.is_cuda else 0
        cast = weight.detach().to(dtype)
        return cls(pad(cast, (0, 0, 0, padding)) if padding else cast, bias, len(weight))

    @property
    def weight(self) -> Tensor:
        return self.padded[: self.vocabulary]

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [r, V] of hidden rows [r, D], float32 at least; a view with unit column stride."""
        padding = -len(hidden) % (128 if hidden.is_cuda else 4)
        rows = pad(hidden, (0, 0, 0, padding)) if padding else hidden
        with without_split_k(rows.device, rows.dtype):
            logits = product(rows, self.padded.t())[: len(hidden), : self.vocabulary]
        return logits if self.bias is None else logits.add_(self.bias)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole groups of a pack: their logit rows, their answers and the counted tokens of these."""

    rows: slice
    answers: slice
    counted: slice

    @property
    def shares_rows(self) -> bool:
        """Whether several answers share a logit row. If not, each counted token has its own, in the same order."""
        return _size(self.counted) != _size(self.rows)

    def is_whole(self, rows: slice) -> bool:
        return rows == self.rows

    def within(self, rows: slice) -> slice:
        """Where rows of the pack lie among the chunk's."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def by_answer(self, of_pieces: Sequence[Tensor], batch: PackedBatch) -> Tensor:
        """Log-probs of the chunk's answers, float64, from those of its logit rows, piece by piece. Of none, it is 0."""
        if not of_pieces:
            return torch.zeros(_size(self.answers), dtype=torch.float64, device=batch.targets.device)
        row_logps = torch.cat([*of_pieces])
        if self.shares_rows:
            row_logps = row_logps[self._row_of_counted(batch)]
        return sum_by_answer(row_logps, self._answer_of_counted(batch), _size(self.answers))

    def by_row(self, d_sums: Tensor, batch: PackedBatch) -> Tensor:
        """The gradient by the log-probs of the chunk's logit rows, float64, from that by its answers': a row's is the
        sum of those of all answers that it counts for."""
        d_counted = d_sums[self._answer_of_counted(batch)]
        if self.shares_rows:
            return sum_by_place(d_counted, self._row_of_counted(batch), _size(self.rows))
        return d_counted

    def _answer_of_counted(self, batch: PackedBatch) -> Tensor:
        return batch.answer_of_counted[self.counted] - self.answers.start

    def _row_of_counted(self, batch: PackedBatch) -> Tensor:
        return batch.logit_row_of_counted[self.counted] - self.rows.start


@dataclass(slots=True)
class _Piece:
    rows: slice
    logits: Tensor | None  # None where they are to be computed again
    logps: Tensor
    lse: Tensor

    def kept(self, chunk: _Chunk) -> _Piece:
        """This piece until the whole chunk's log-probs are known: with its logits where it is all of the chunk."""
        if not chunk.is_whole(self.rows):
            self.logits = None
        return self


def _factor_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which hidden states, weights and the gradient of logits are multiplied.

    A GPU multiplies bfloat16 into float32; a CPU cannot, so there the factors are float32 themselves.
    """
    return hidden.dtype if hidden.is_cuda else torch.promote_types(hidden.dtype, torch.float32)


def _as_factor(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the gradient of logits [r, V]: their own where their dtype is the factors', else laid out as they are,
    for a matrix unit takes no factor whose rows begin at any odd place."""
    if logits.dtype == dtype:
        return logits
    return logits.new_empty(len(logits), logits.stride(0), dtype=dtype)[:, : logits.shape[1]]


def _differentiate(loss: ChunkLoss, answers: slice, logps: Tensor) -> tuple[Tensor, Tensor]:
    """The share of the loss of some answers, and its gradient by their log-probs."""
    with torch.enable_grad():
        leaf = logps.detach().requires_grad_()
        share = loss(answers.start, answers.stop, leaf)
        (gradient,) = torch.autograd.grad(share, leaf)
    return share.detach(), gradient


def _chunks(batch: PackedBatch, limit: int) -> list[_Chunk]:
    """Cut a pack between groups, each chunk's logit rows within the limit unless one group alone exceeds it."""
    if not batch.groups:  # a pack of nothing, for a process that has less to do than others
        return []
    tokens_before = [0, *accumulate(batch.answer_lengths)]
    cuts = [(0, 0)]  # answers and logit rows before each chunk
    answers = rows = 0
    for more_answers, more_rows in batch.groups:
        if answers > cuts[-1][0] and rows + more_rows - cuts[-1][1] > limit:
            cuts.append((answers, rows))
        answers, rows = answers + more_answers, rows + more_rows
    return [
        _Chunk(slice(row, row_end), slice(answer, end), slice(tokens_before[answer], tokens_before[end]))
        for (answer, row), (end, row_end) in pairwise([*cuts, (answers, rows)])
    ]


def _size(part: slice) -> int:
    return part.stop - part.start
