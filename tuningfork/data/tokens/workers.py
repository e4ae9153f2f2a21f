"""Batches of rows -> tokens in this process, or in one for each core.

The tokenizer's own threads cannot keep many cores busy: reading rows, printing chat templates and cutting texts is
Python. So long tables are spread over processes, each with a copy of the tokenizer. Batches come back in their order,
and what becomes of a row depends on that row alone, so the result is the same for any number of processes.
"""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tuningfork.data.config import DataConfig
from tuningfork.data.examples.row_reader import RowReader
from tuningfork.data.tables.rows import Row
from tuningfork.data.tokens.encode_rows import EncodedBatch, RowBatch, RowEncoder
from tuningfork.errors import DataError
from tuningfork.files import SCRATCH_CURE, explained, scratch
from tuningfork.library_words import show_library_words

BATCH = 256  # rows encoded in one call: enough to keep the tokenizer's threads busy, few enough to show progress
ROWS_A_PROCESS = 2048  # fewer are done sooner without a process of their own, which takes seconds to start
_AHEAD = 3  # batches that wait for each process, so that none is idle and few lie in memory

OURS = "tuningfork-tokens"  # the name of processes that are started here
GUARD = (
    "A script must ask for its data below `if __name__ == '__main__':`, for every process reads the script again; or "
    "set data.workers: 1."
)


def check_started() -> None:
    """Raise DataError in a process that is still starting: it reads a script that prepares data as it is read.

    Such a process must not come as far as the first one's lock, which that one holds until the process has started.
    """
    process = multiprocessing.current_process()
    # private: multiprocessing.process._inheriting
    if process.name == OURS and getattr(process, "_inheriting", False):
        raise DataError(f"A process that turns rows into tokens cannot start. {GUARD}")


class Workers:
    """Encodes batches: in this process and, for many rows, in others with an encoder like its own.

    There are as many as data.workers allows, else one for each core, and no more than all rows until now pay for. They
    stay for further tables until `close`, for they take seconds to start. A daemon process works alone: it may not have
    others.
    """

    def __init__(self, encoder: RowEncoder, config: DataConfig) -> None:
        self.encoder, self.config = encoder, config
        self._most = 1 if multiprocessing.current_process().daemon else config.workers or _cores()
        self._rows = 0  # of all tables until now
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []
        self._ready: list[Future[EncodedBatch]] = []  # done once a process is; one for each
        self._running = ExitStack()

    def encode(self, rows: Iterable[tuple[int, Row]], count: int, reader: RowReader) -> Iterator[EncodedBatch]:
        """What becomes of each batch of a table's rows, in their order. `count` is about how many there are.

        Raises DataError where a process is killed, or where no row can be used.
        """
        drawn = iter(rows)
        batches = iter(lambda: list(islice(drawn, BATCH)), [])
        self._rows += count
        wanted = min(self._most, self._rows // ROWS_A_PROCESS)
        if wanted <= 1:
            yield from (self.encoder(batch, reader) for batch in batches)
            return
        try:
            yield from self._spread(batches, reader, self._started(wanted, count, reader))
        except BrokenProcessPool as error:
            raise self._killed() from error

    def close(self) -> None:
        """End the other processes, without waiting for those that are still starting."""
        for process in self._processes:
            process.terminate()
        self._running.close()
        self._pool, self._processes, self._ready = None, [], []

    def _started(self, wanted: int, count: int, reader: RowReader) -> ProcessPoolExecutor:
        """The processes: those that run, or more, started anew, where a table of `count` rows alone pays for them or
        twice as many are wanted. While none has begun, those that start are not exchanged for others that do."""
        if self._pool is not None:
            running = len(self._ready)
            pays = count // ROWS_A_PROCESS >= wanted or wanted >= 2 * running
            if wanted <= running or not pays or not self._begun():
                return self._pool
        self.close()
        # In a file: handing megabytes to a process that dies as it starts would wait for ever.
        copies = self._running.enter_context(scratch()) / "encoder"
        with explained(copies, SCRATCH_CURE):
            copies.write_bytes(pickle.dumps((self.encoder.tokenizer, self.config, self.encoder.group_by)))
        pool = ProcessPoolExecutor(wanted, self._fresh(), _begin, (str(copies),))
        self._running.callback(pool.shutdown, wait=True, cancel_futures=True)
        self._ready = [_submit(pool, [], reader) for _ in range(wanted)]
        self._pool = pool
        return pool

    def _spread(
        self, batches: Iterator[RowBatch], reader: RowReader, pool: ProcessPoolExecutor
    ) -> Iterator[EncodedBatch]:
        """What becomes of all batches, made by the processes; the first of them here, while they start."""
        waiting: deque[Future[EncodedBatch]] = deque()
        try:
            for batch in batches:
                if not waiting and not self._begun():
                    yield self.encoder(batch, reader)
                    continue
                waiting.append(_submit(pool, batch, reader))
                if len(waiting) >= len(self._ready) * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _fresh(self) -> Any:
        """What starts processes: anew, for in copies of this one threads of libraries would be in any state; by our
        name; and so that they are known here, too."""
        context: Any = copy.copy(multiprocessing.get_context("spawn"))
        start = context.Process

        def process(*args: Any, **options: Any) -> BaseProcess:
            self._processes.append(start(*args, name=OURS, **options))
            return self._processes[-1]

        context.Process = process
        return context

    def _begun(self) -> bool:
        """Whether a process is ready to work."""
        return any(future.done() for future in self._ready)

    def _killed(self) -> DataError:
        if not any(future.done() and future.exception() is None for future in self._ready):
            return DataError(
                "No process that turns rows into tokens could start. Where it was killed for want of memory, set "
                f"data.workers to less. {GUARD}"
            )
        count = len(self._ready)
        return DataError(
            f"A process that turns rows into tokens was killed, perhaps for want of memory ({count} were at work). "
            f"Set data.workers to less: {count // 2}."
        )


def _submit(pool: ProcessPoolExecutor, batch: RowBatch, reader: RowReader) -> Future[EncodedBatch]:
    """Hand a batch to the processes, of which this may start another one.

    Ctrl-C reaches all processes, and the first of them ends the others: for them it is blocked from their beginning.
    Raises DataError where the machine refuses another process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_work, batch, reader)
    except OSError as error:
        raise DataError(
            f"The machine refuses another process that turns rows into tokens ({error.strerror or error}). Set "
            "data.workers to less, such as 1."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_encoder: RowEncoder  # of a working process


def _begin(copies: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    show_library_words()
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    _encoder = RowEncoder(*pickle.loads(Path(copies).read_bytes()))


def _end_with_the_first() -> None:
    """End this process when the one that it works for has gone, which may have had no time to say so."""
    first = multiprocessing.parent_process()
    assert first is not None
    multiprocessing.connection.wait([first.sentinel])
    os._exit(1)


def _work(batch: RowBatch, reader: RowReader) -> EncodedBatch:
    return _encoder(batch, reader)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
