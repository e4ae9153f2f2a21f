"""A checkpoint's files, written by all ranks into one folder that is whole or absent.

Each rank writes what it alone has, and what several have one of them. The first rank makes the folder aside, and gives
it its name once all have written: where one fails, or is gone, none of it stays.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # private: torch.distributed.checkpoint.api
from torch.distributed.checkpoint.filesystem import FileSystem  # private: torch.distributed.checkpoint.filesystem

from tuningfork.distributed.ranks import Ranks, answered
from tuningfork.errors import RunFolderError, SaidElsewhere
from tuningfork.files import Hashed, explained, seal, whole_folder
from tuningfork.train.staging import StagedPlanner


def write(
    path: Path, state: dict[str, Any], beside: tuple[str, str], ranks: Ranks, staged: StagedPlanner | None = None
) -> None:
    """Write a checkpoint as the folder `path`.

    Args:
        state: the tensors of this rank; one that is spread over ranks as a DTensor, whose shards they all write.
        beside: name and text of a file beside them.
        staged: copies of these tensors, to be written in their place.

    Raises:
        RunFolderError: the disk refuses, on this rank. Nothing of the checkpoint stays.
        SaidElsewhere: it refuses on another one.
        RankError: another rank has ended.
    """
    with ExitStack() as stack:
        own = None
        with ranks.agreeing():
            if ranks.first:
                own = stack.enter_context(whole_folder(path))
        aside = cast(Path, ranks.from_first(own))
        files = HashedFiles()
        with ranks.agreeing(), explained(path):
            if not aside.is_dir():
                raise RunFolderError(
                    f"{aside}, which the first process has made, is not there on this machine. output.dir must be a "
                    "folder that all machines of the run see, on a network file system, say."
                )
        with explained(path):
            _write_tensors(aside, files, state, ranks, staged)
        checksums = {name: digest for of_rank in ranks.all(files.checksums) for name, digest in of_rank.items()}
        with ranks.agreeing():
            if ranks.first:
                name, text = beside
                (aside / name).write_text(text)
                seal(aside, checksums)  # dcp has no checksums, and loads a weight with a wrong bit as it is
                stack.close()


class HashedFiles(FileSystem):
    """The files of a checkpoint, hashed while they are written, for they are too large to be read back for it."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}  # by the file's name

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        with super().create_stream(path, mode) as file:
            hashed = Hashed(cast(BinaryIO, file))
            yield hashed
        self.checksums[Path(path).name] = hashed.checksum()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def _write_tensors(
    folder: Path, files: HashedFiles, state: dict[str, Any], ranks: Ranks, staged: StagedPlanner | None
) -> None:
    """Write this rank's share of the state. All ranks know then whether all have."""
    writer = dcp.FileSystemWriter(folder)
    writer.fs = files
    if staged is not None:
        writer.per_thread_copy_ahead = 0  # nothing is to be copied, and a thread has no stream of a GPU for it
    alone = ranks.size == 1
    try:
        with one_process() if alone else answered():
            dcp.save(state, storage_writer=writer, planner=staged, process_group=ranks.host, no_dist=alone)
    except CheckpointException as error:
        failed = [failure for rank, (failure, _) in error.failures.items() if rank == ranks.rank]
        if not failed:
            raise SaidElsewhere() from error
        raise _of_disk(failed[0]) or error from error


@contextmanager
def one_process() -> Iterator[None]:
    """Without torch's warning that `no_dist` means one process: that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _of_disk(failure: BaseException) -> OSError | MemoryError | None:
    """The disk's own complaint inside a failed save, or that there was no memory for it."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError | MemoryError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
