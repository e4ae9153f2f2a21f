"""torch.distributed.checkpoint's files, read so that nothing in them is run.

They hold pickles, and a pickle is a program: `.metadata`, which says what lies where, is one, and so is each entry of
the data files. The library runs the first, and those of entries that are no tensors, whatever they call for; here they
may call for nothing but what a checkpoint is made of. Checksums are no help in this: they show what a disk has done to
the files, while whoever writes other files writes other checksums.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tuningfork.errors import first_line, of_pickle
from tuningfork.files import check_plain, plain

METADATA = ".metadata"

_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}
_FILLED = (  # objects of these are made first and get their fields then
    *(Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, TensorProperties, _StorageInfo),
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_FILLED, _MEM_FORMAT_ENCODING, torch.Size)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[name],
    # Where the checkpoint was written: it may have been moved since, and nobody asks.
    **{(module, "PosixPath"): lambda *parts: None for module in ("pathlib", "pathlib._local")},
}


class Foreign(ValueError):
    """A checkpoint's file calls for something that none is made of, or says other things than where its parts lie."""


class PlainReader(FileSystemReader):
    """Reads a checkpoint whose files call for nothing but what one is made of, and which lie in its folder.

    Raises:
        Foreign: they call for something else.
        RunFolderError: one of them is a link or a pipe.
        OSError: `.metadata` cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = _metadata(path / METADATA)

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)  # which loads tensors as such, and hands the rest to the planner
        except pickle.UnpicklingError as error:
            raise Foreign(f"its data: {of_pickle(error)}") from error


class PlainPlanner(DefaultLoadPlanner):
    """Takes of the entries that are no tensors only plain values: numbers, texts, lists and tables of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, "cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def _metadata(path: Path) -> Metadata:
    with open(path, "rb", opener=plain) as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            raise Foreign(f"{path.name}: {of_pickle(error)}") from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # what is no pickle fails in any way
            raise Foreign(f"{path.name} is broken: {first_line(error)}") from error
    stored = metadata.storage_data if isinstance(metadata, Metadata) else None
    if not isinstance(stored, dict) or not all(map(_lies_beside, stored.values())):
        raise Foreign(f"{path.name} does not say what lies where in the files beside it")
    for name in {place.relative_path for place in stored.values()}:
        check_plain(path.with_name(name))
    metadata.storage_meta = StorageMeta()
    return metadata


def _lies_beside(place: object) -> bool:
    """Whether this is a place in a data file of the checkpoint's own folder, stored as it is."""
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    name = place.relative_path
    return Path(name).name == name and name.endswith(DEFAULT_SUFFIX) and not place.transform_descriptors


_InPython: Any = pickle._Unpickler


class _MetadataUnpickler(_InPython):
    """The unpickler that is written in Python, so that one of its steps can be held: it sets fields of an object, which
    must not be those of a class, for they would stay set in the whole process."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return known

    def load_build(self) -> None:
        if type(self.stack[-2]) not in _FILLED:
            raise pickle.UnpicklingError(f"fields of {self.stack[-2]!r}")
        super().load_build()

    dispatch = _InPython.dispatch | {pickle.BUILD[0]: load_build}
