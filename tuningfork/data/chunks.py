"""Examples -> tokens, a chunk at a time, in this process or in one for each core.

The tokenizer's own threads cannot keep many cores busy: printing chat templates and cutting texts is Python. So a long
table is spread over processes, each with a copy of the tokenizer. Chunks come back in their order, and what becomes of
an example depends on that example alone, so the result is the same for any number of processes.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig
from tuningfork.data.shorten import shorten, size_of
from tuningfork.data.store import Columns, columns_of
from tuningfork.data.template import RenderedExample, render
from tuningfork.data.tokenize import Encoded, Encoder
from tuningfork.data.values import Unusable
from tuningfork.errors import DataError
from tuningfork.files import SCRATCH_CURE, explained, scratch
from tuningfork.records import DroppedRow, Example, Size, TokenExample

CHUNK = 256  # examples encoded in one call: enough to keep the tokenizer's threads busy, few enough to show progress
ROWS_A_PROCESS = 2048  # fewer are done sooner without a process of their own, which takes seconds to start
_AHEAD = 3  # chunks that wait for each process, so that none is idle and few lie in memory


@dataclass(frozen=True, slots=True)
class Block:
    """What became of one chunk: its examples as columns, and an account of the others."""

    read: int
    columns: Columns
    dropped: list[DroppedRow] = field(default_factory=list)
    notes: list[tuple[str, int]] = field(default_factory=list)  # what is worth knowing of a row in use, and which
    sizes: dict[int, Size] = field(default_factory=dict)  # row -> of an example over max_length, cut or left out


class ChunkEncoder:
    """Prints, encodes, shortens and checks chunks of examples. Raises DataError for an unfit tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, config.template)
        self.train_on, self.max_length, self.over_length = config.train_on, config.max_length, config.over_length

    def __call__(self, examples: Sequence[Example]) -> Block:
        dropped: list[DroppedRow] = []
        notes: list[tuple[str, int]] = []
        used: list[TokenExample] = []
        sizes: dict[int, Size] = {}
        bos = self.tokenizer.bos_token_id
        for encoded in self._encode(examples, dropped):
            if encoded.example.longest > self.max_length:
                sizes[encoded.example.source.row] = size_of(encoded.example, bos)
            try:
                example, cuts = shorten(encoded.example, self.max_length, self.over_length, bos)
                _check(example)
            except Unusable as unusable:
                dropped.append(_drop(encoded.example, unusable))
                continue
            used.append(example)
            notes += ((note, example.source.row) for note in (*encoded.notes, *cuts))
        return Block(len(examples), columns_of(used), dropped, notes, sizes)

    def _encode(self, examples: Sequence[Example], dropped: list[DroppedRow]) -> list[Encoded]:
        """Render and encode; what rows say beside the text goes along. Unusable examples are added to `dropped`."""
        kept: list[Example] = []
        rendered: list[RenderedExample] = []
        for example in examples:
            try:
                rendered.append(render(example, self.tokenizer, self.train_on))
                kept.append(example)
            except Unusable as unusable:
                dropped.append(_drop(example, unusable))
        return [
            encoded._replace(
                example=replace(encoded.example, label=example.label, weight=example.weight, margin=example.margin)
            )
            for example, encoded in zip(kept, self.encoder.encode(rendered), strict=True)
        ]


def encode_chunks(
    examples: Iterator[Example], count: int, encoder: ChunkEncoder, config: DataConfig
) -> Iterator[Block]:
    """A block for each chunk of the examples, in their order. `count` is about how many there are.

    As many processes work on them, each with an encoder like this one, as data.workers allows, else one for each core,
    and no more than the examples pay for. Raises DataError where a process is killed.
    """
    chunks = iter(lambda: list(islice(examples, CHUNK)), [])
    workers = min(config.workers or _cores(), count // ROWS_A_PROCESS)
    if workers <= 1:
        yield from map(encoder, chunks)
        return
    with scratch() as folder:
        # In a file: handing megabytes to a process that dies as it starts would wait for ever.
        copies = folder / "encoder"
        with explained(copies, SCRATCH_CURE):
            copies.write_bytes(pickle.dumps((encoder.tokenizer, config)))
        yield from _spread(chunks, workers, encoder, str(copies))


def _spread(chunks: Iterator[list[Example]], workers: int, encoder: ChunkEncoder, copies: str) -> Iterator[Block]:
    """The blocks of all chunks, made by this number of processes."""
    # Fresh processes: in copies of this one, the tokenizer's and PyTorch's threads would be in any state.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (copies,))
    try:
        ready = [_submit(pool, []) for _ in range(workers)]
        waiting: deque[Future[Block]] = deque()
        for chunk in chunks:
            if not waiting and not _begun(ready):  # they take seconds to start; until then the work is done here
                yield encoder(chunk)
                continue
            waiting.append(_submit(pool, chunk))
            if len(waiting) >= workers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"A process that turns rows into tokens was killed, perhaps for want of memory ({workers} were at work). "
            f"Set data.workers to less: {workers // 2}."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: list[Example]) -> Future[Block]:
    """Hand a chunk to the processes, of which this may start another one.

    Ctrl-C reaches all processes, and the first of them ends the others: for them it is blocked from their beginning.
    Raises DataError where the machine refuses another process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_work, chunk)
    except OSError as error:
        raise DataError(
            f"The machine refuses another process that turns rows into tokens ({error.strerror or error}). Set "
            "data.workers to less, such as 1."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begun(ready: Sequence[Future[Block]]) -> bool:
    """Whether a process is ready to work."""
    return any(future.done() for future in ready)


_encoder: ChunkEncoder  # of a working process


def _begin(copies: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    _encoder = ChunkEncoder(*pickle.loads(Path(copies).read_bytes()))


def _end_with_the_first() -> None:
    """End this process when the one that it works for has gone, which may have had no time to say so."""
    first = multiprocessing.parent_process()
    assert first is not None
    multiprocessing.connection.wait([first.sentinel])
    os._exit(1)


def _work(examples: list[Example]) -> Block:
    return _encoder(examples)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(example: TokenExample) -> None:
    """Raise Unusable where an encoded example cannot be trained on as a whole."""
    for place in range(len(example.answers)):
        if example.answer_tokens(place) == 0:
            raise Unusable("no token of an answer counts", f"answer {place} of {len(example.answers)}")
    for one, other in combinations(example.answers, 2):
        if np.array_equal(one.ids, other.ids):
            reason = "chosen equals rejected" if len(example.answers) == 2 else "answers are equal"
            raise Unusable(reason, "they differ in the file, but not as the tokens that are left")


def _drop(example: Example | TokenExample, unusable: Unusable) -> DroppedRow:
    return DroppedRow(example.source.file, example.source.row, unusable.reason, unusable.detail)
