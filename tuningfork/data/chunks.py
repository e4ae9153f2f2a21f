"""Rows -> tokens, a chunk at a time, in this process or in one for each core.

The tokenizer's own threads cannot keep many cores busy: reading rows, printing chat templates and cutting texts is
Python. So a long table is spread over processes, each with a copy of the tokenizer. Chunks come back in their order,
and what becomes of a row depends on that row alone, so the result is the same for any number of processes.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig
from tuningfork.data.examples import RowReader
from tuningfork.data.json_rows import Row
from tuningfork.data.read import Rows
from tuningfork.data.shorten import shorten, size_of
from tuningfork.data.store import Columns, columns_of
from tuningfork.data.template import RenderedExample, render
from tuningfork.data.tokenize import Encoded, Encoder
from tuningfork.data.values import Unusable
from tuningfork.errors import DataError
from tuningfork.files import SCRATCH_CURE, explained, scratch
from tuningfork.records import Example, Size, TokenExample

CHUNK = 256  # rows encoded in one call: enough to keep the tokenizer's threads busy, few enough to show progress
ROWS_A_PROCESS = 2048  # fewer are done sooner without a process of their own, which takes seconds to start
_AHEAD = 3  # chunks that wait for each process, so that none is idle and few lie in memory

OURS = "TUNINGFORK_TOKENS"  # in the environment of processes that are started here
GUARD = (
    "A script must ask for its data below `if __name__ == '__main__':`, for every process reads the script again; or "
    "set data.workers: 1."
)

Chunk = list[tuple[int, Row]]
"""Rows with their numbers."""


@dataclass(frozen=True, slots=True)
class Block:
    """What became of one chunk: its examples as columns, and an account of the others."""

    read: int  # rows
    columns: Columns
    dropped: list[tuple[int, str, str]]  # row, reason, detail
    notes: list[tuple[str, int]]  # what is worth knowing of a row in use, and which
    not_read: list[tuple[str, int]]  # a filled field that nothing reads, and in which row
    sizes: dict[int, Size]  # row -> of an example over max_length, cut or left out


class ChunkEncoder:
    """Reads, prints, encodes, shortens and checks chunks of rows. Raises DataError for an unfit tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, config.template)
        self.train_on, self.max_length, self.over_length = config.train_on, config.max_length, config.over_length

    def __call__(self, chunk: Chunk, reader: RowReader) -> Block:
        """What becomes of the rows. Raises DataError where none of the table can be used."""
        block = Block(len(chunk), {}, [], [], [], {})
        used: list[TokenExample] = []
        bos = self.tokenizer.bos_token_id
        for encoded in self._encode(chunk, reader, block):
            row = encoded.example.source.row
            if encoded.example.longest > self.max_length:
                block.sizes[row] = size_of(encoded.example, bos)
            try:
                example, cuts = shorten(encoded.example, self.max_length, self.over_length, bos)
                _check(example)
            except Unusable as unusable:
                block.dropped.append((row, unusable.reason, unusable.detail))
                continue
            used.append(example)
            block.notes.extend((note, row) for note in (*encoded.notes, *cuts))
        return replace(block, columns=columns_of(used))

    def _encode(self, chunk: Chunk, reader: RowReader, block: Block) -> list[Encoded]:
        """Read, render and encode; what rows say beside the text goes along."""
        kept: list[Example] = []
        rendered: list[RenderedExample] = []
        for number, row in chunk:
            try:
                read = reader(number, row)
                rendered.append(render(read.example, self.tokenizer, self.train_on))
            except Unusable as unusable:
                block.dropped.append((number, unusable.reason, unusable.detail))
                continue
            kept.append(read.example)
            block.notes.extend((note, number) for note in read.notes)
            block.not_read.extend((name, number) for name in read.not_read)
        return [
            encoded._replace(
                example=replace(encoded.example, label=example.label, weight=example.weight, margin=example.margin)
            )
            for example, encoded in zip(kept, self.encoder.encode(rendered), strict=True)
        ]


def check_started() -> None:
    """Raise DataError in a process that is still starting: it reads a script that prepares data as it is read.

    Such a process must not come as far as the first one's lock, which that one holds until the process has started.
    """
    if OURS in os.environ and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DataError(f"A process that turns rows into tokens cannot start. {GUARD}")


def encode_chunks(
    rows: Rows, count: int, reader: RowReader, encoder: ChunkEncoder, config: DataConfig
) -> Iterator[Block]:
    """A block for each chunk of a table's rows, in their order. `count` is about how many there are.

    As many processes work on them, each with an encoder like this one, as data.workers allows, else one for each core,
    and no more than the rows pay for. Raises DataError where a process is killed, or where no row can be used.
    """
    drawn = iter(rows)
    chunks = iter(lambda: list(islice(drawn, CHUNK)), [])
    workers = min(config.workers or _cores(), count // ROWS_A_PROCESS)
    if workers <= 1:
        yield from (encoder(chunk, reader) for chunk in chunks)
        return
    with scratch() as folder:
        # In a file: handing megabytes to a process that dies as it starts would wait for ever.
        copies = folder / "encoder"
        with explained(copies, SCRATCH_CURE):
            copies.write_bytes(pickle.dumps((encoder.tokenizer, config, reader)))
        yield from _spread(chunks, workers, lambda chunk: encoder(chunk, reader), str(copies))


def _spread(chunks: Iterator[Chunk], workers: int, here: Callable[[Chunk], Block], copies: str) -> Iterator[Block]:
    """The blocks of all chunks, made by this number of processes; the first of them `here`, while processes start."""
    # Fresh processes: in copies of this one, the tokenizer's and PyTorch's threads would be in any state.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (copies,))
    try:
        ready = [_submit(pool, []) for _ in range(workers)]
        waiting: deque[Future[Block]] = deque()
        for chunk in chunks:
            if not waiting and not _begun(ready):
                yield here(chunk)
                continue
            waiting.append(_submit(pool, chunk))
            if len(waiting) >= workers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        if not any(future.done() and future.exception() is None for future in ready):
            raise DataError(
                "No process that turns rows into tokens could start. Where it was killed for want of memory, set "
                f"data.workers to less. {GUARD}"
            ) from error
        raise DataError(
            f"A process that turns rows into tokens was killed, perhaps for want of memory ({workers} were at work). "
            f"Set data.workers to less: {workers // 2}."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[Block]:
    """Hand a chunk to the processes, of which this may start another one.

    Ctrl-C reaches all processes, and the first of them ends the others: for them it is blocked from their beginning.
    Raises DataError where the machine refuses another process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[OURS] = "1"
    try:
        return pool.submit(_work, chunk)
    except OSError as error:
        raise DataError(
            f"The machine refuses another process that turns rows into tokens ({error.strerror or error}). Set "
            "data.workers to less, such as 1."
        ) from error
    finally:
        del os.environ[OURS]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begun(ready: Sequence[Future[Block]]) -> bool:
    """Whether a process is ready to work."""
    return any(future.done() for future in ready)


_encoder: ChunkEncoder  # of a working process, and the reader of its table
_reader: RowReader


def _begin(copies: str) -> None:
    global _encoder, _reader
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    tokenizer, config, _reader = pickle.loads(Path(copies).read_bytes())
    _encoder = ChunkEncoder(tokenizer, config)


def _end_with_the_first() -> None:
    """End this process when the one that it works for has gone, which may have had no time to say so."""
    first = multiprocessing.parent_process()
    assert first is not None
    multiprocessing.connection.wait([first.sentinel])
    os._exit(1)


def _work(chunk: Chunk) -> Block:
    return _encoder(chunk, _reader)


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
