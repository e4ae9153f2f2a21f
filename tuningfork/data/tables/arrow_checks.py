"""What the buffers of an Arrow table say, looked at before values are made of them.

The library takes a file's word for where each value begins and how long each list is. A wrong word of a mapped file
ends the process, and a true one may stand for very much: a list of one value, a hundred million times over, takes a
few bytes in a dictionary, in a run, or as nulls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tuningfork.data.tables.rows import MOST_BYTES, MOST_VALUES
from tuningfork.errors import DataError
from tuningfork.files import opened

_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)
_TEXTS = (
    (pa.types.is_string, pa.binary),
    (pa.types.is_large_string, pa.large_binary),
    (pa.types.is_string_view, pa.binary_view),
)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
_VIEW = np.dtype([("length", "<i4"), ("rest", "V12")])  # of a text or bytes among string views


class TooMuch(Exception):
    """Rows hold more values or bytes than are made at once."""


def check_buffers(file: str, table: pa.Table) -> None:
    """Raise DataError where a table's buffers do not hold together: an offset beyond its values, a dictionary's index
    without a word. What a value is as text or as a date costs its own row, and is not looked at here."""
    for batch in table.to_batches():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                _as_bytes(column).validate(full=True)
            except (pa.ArrowException, OverflowError) as error:
                raise DataError(
                    f"{file}: its column {name!r} is damaged ({str(error).splitlines()[0][:300]}). Save it again."
                ) from error


def check_uncompressed(path: Path) -> None:
    """Raise DataError where an Arrow stream holds compressed buffers, which `datasets` never writes: they would be
    unpacked as the file is opened, whatever they grow to. Raises pyarrow's own errors for what is no stream."""
    opened(path).close()  # which is a plain file
    with pa.memory_map(str(path)) as file:
        for message in pa.ipc.MessageReader.open_stream(file):
            if message.type in ("record batch", "dictionary") and _is_compressed(message):
                raise DataError(f"{path}: holds compressed data, which `datasets` does not write. Save it again.")


def of_bounded_size(file: str, batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The batches, each cut until it holds no more than MOST_VALUES values and MOST_BYTES bytes of text and the like.

    Raises DataError where a single row holds more.
    """
    done = 0
    for batch in batches:
        waiting = [batch]
        while waiting:
            part = waiting.pop()
            try:
                room = _Room()
                for column in part.columns:
                    for chunk in column.chunks:
                        room.take(chunk)
            except TooMuch as error:
                if len(part) == 1:
                    raise DataError(
                        f"{file}: row {done + 1} holds {error}, more than is read at once. Look at what is there, and "
                        "remove it."
                    ) from None
                half = len(part) // 2
                waiting += [part.slice(half), part.slice(0, half)]
                continue
            done += len(part)
            yield part


class _Room:
    """Counts the values and bytes that Python would make of arrays. Raises TooMuch."""

    def __init__(self) -> None:
        self.values = self.bytes = 0

    def take(self, array: pa.Array) -> None:
        self._add(len(array))
        kind = array.type
        if isinstance(array, pa.ExtensionArray):
            self.take(array.storage)
        elif pa.types.is_struct(kind):
            for inner in array.flatten():
                self.take(inner)
        elif pa.types.is_map(kind):
            offsets = array.offsets
            start, stop = offsets[0].as_py(), offsets[-1].as_py()
            self._look_at(stop - start)
            self.take(array.keys.slice(start, stop - start))
            self.take(array.items.slice(start, stop - start))
        elif pa.types.is_fixed_size_list(kind) or any(test(kind) for test, _ in _LISTS):
            self._look_at(pc.sum(pc.list_value_length(array)).as_py() or 0)
            self.take(array.flatten())
        elif any(test(kind) for test in _BYTES):
            self._add(0, pc.sum(pc.binary_length(array)).as_py() or 0)
        elif pa.types.is_dictionary(kind) and any(test(kind.value_type) for test in _BYTES):
            lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
            self._add(0, pc.sum(lengths).as_py() or 0)
        elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            views = np.frombuffer(array.buffers()[1], _VIEW)["length"][array.offset : array.offset + len(array)]
            self._add(0, int(views.astype(np.int64).sum()))
        elif pa.types.is_nested(kind) or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            self._add(0, len(array) * array.get_total_buffer_size())  # at most: each value may be all that there is

    def _look_at(self, values: int) -> None:
        """Raise TooMuch where so many values more were too many; they are counted where they are taken."""
        if self.values + values > MOST_VALUES:
            raise TooMuch(f"more than {MOST_VALUES:,} values")

    def _add(self, values: int, size: int = 0) -> None:
        self._look_at(values)
        self.values += values
        self.bytes += size
        if self.bytes > MOST_BYTES:
            raise TooMuch(f"more than {MOST_BYTES >> 20:,} MiB")


def _as_bytes(array: pa.Array) -> pa.Array:
    """A table's buffers with bytes for text, dates and the like, of which nothing can be wrong but where they lie."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    try:
        return array.view(_type_of_bytes(array.type))
    except pa.ArrowNotImplementedError:
        return array


def _type_of_bytes(kind: pa.DataType) -> pa.DataType:
    for test, make in _TEXTS:
        if test(kind):
            return make()
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.binary(kind.bit_width // 8)
    if pa.types.is_struct(kind):
        return pa.struct([_field_of_bytes(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field_of_bytes(kind.key_field), _field_of_bytes(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_of_bytes(kind.value_field), kind.list_size)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _type_of_bytes(kind.value_type), kind.ordered)
    return next((make(_field_of_bytes(kind.value_field)) for test, make in _LISTS if test(kind)), kind)


def _field_of_bytes(field: pa.Field) -> pa.Field:
    return field.with_type(_type_of_bytes(field.type))


def _is_compressed(message: Any) -> bool:
    """Whether a message's buffers are compressed, by its header: a table of FlatBuffers, laid out as in Arrow's
    Message.fbs."""
    data = message.metadata.to_pybytes()

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, data, at)[0])

    def entry(table: int, place: int) -> int:
        """Where a table's entry lies, as its own table of offsets says; 0 where it has none."""
        offsets = table - number("<i", table)
        at = offsets + 4 + 2 * place
        found = number("<H", at) if at < offsets + number("<H", offsets) else 0
        return table + found if found else 0

    def within(table: int, place: int) -> int:
        at = entry(table, place)
        return at + number("<I", at)

    header = within(number("<I", 0), 2)
    batch = within(header, 1) if message.type == "dictionary" else header
    return entry(batch, 3) != 0
