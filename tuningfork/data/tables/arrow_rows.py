"""Tables of columns, from Parquet or `datasets` -> rows, with the values exactly as the table has them.

Every value is read by itself. One that cannot be read is `Broken`, which costs its row where somebody reads it, and
nothing where nobody does; so does a whole column of a kind that `datasets` does not know, such as a map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import datasets
import pyarrow as pa

from tuningfork.data.tables.json_values import check_values
from tuningfork.data.tables.rows import Broken, Row

# private: datasets.Json
_JSON = getattr(datasets, "Json", ())  # older versions do not know it
FILE = {"bytes", "path"}  # fields of a picture or a sound: nobody here looks at them
UNREADABLE = "unreadable value"


def arrow_rows(batches: Iterable[pa.Table]) -> Iterator[tuple[int, Row]]:
    """The rows of a table, numbered from 1. A field of a row may be null; an object in it has only the fields that say
    something. Maps are objects, and bytes that are UTF-8 are text."""
    number = 0
    kinds: dict[str, Any] | None = None
    for batch in batches:
        if kinds is None:
            kinds = {field.name: _kind(field, batch.schema.metadata) for field in batch.schema}
        columns = [_values(name, batch.column(name), kind) for name, kind in kinds.items()]
        for values in zip(*columns, strict=True):
            number += 1
            yield number, dict(zip(kinds, values, strict=True))


def _kind(field: pa.Field, metadata: Any) -> Any:
    """What `datasets` makes of a column; None for one that it does not know."""
    try:
        found = datasets.Features.from_arrow_schema(pa.schema([field], metadata=metadata))[field.name]
    except Exception:  # the library raises whatever its own libraries raise
        return None
    return _as_stored(found)


def _as_stored(kind: Any) -> Any:
    """A kind of column that gives values as they are stored: nobody here looks at pictures."""
    if isinstance(kind, dict):
        return {key: _as_stored(inner) for key, inner in kind.items()}
    if getattr(kind, "decode", False) and not isinstance(kind, _JSON):
        return dataclasses.replace(kind, decode=False)
    inner = getattr(kind, "feature", None)  # of any of the library's kinds of list
    return kind if inner is None else dataclasses.replace(kind, feature=_as_stored(inner))


def _values(name: str, column: pa.ChunkedArray, kind: Any) -> list[Any]:
    read = _reader(name, column.type, kind)
    try:
        return [read(value) for value in column.to_pylist(maps_as_pydicts="strict")]
    except MemoryError:
        raise
    except Exception:  # whatever a library makes of bytes that are no value
        return [_one(name, value, read) for value in column]


def _one(name: str, value: pa.Scalar, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value.as_py(maps_as_pydicts="strict"))
    except MemoryError:
        raise
    except Exception as error:
        return Broken(UNREADABLE, f"{name} cannot be read ({cause_line(error)[:300]}); write it anew with plain values")


def _reader(name: str, kind: pa.DataType, found: Any) -> Callable[[Any], Any]:
    """What makes a column's values of those that pyarrow gives."""
    whole = datasets.Features({name: found}) if found is not None and _decodes(found) else None
    if whole is None:
        return (lambda value: _plain(value, kind)) if _is_nested(kind) or _is_binary(kind) else lambda value: value

    def decoded(value: Any) -> Any:
        if isinstance(value, str):
            check_values(value)
        return _plain(whole.decode_example({name: value})[name], kind)

    return decoded


def _decodes(kind: Any) -> bool:
    """Whether `datasets` stores values of this kind as something else: JSON, as text."""
    if isinstance(kind, dict):
        return any(map(_decodes, kind.values()))
    inner = getattr(kind, "feature", None)
    return isinstance(kind, _JSON) if inner is None else _decodes(inner)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value without the nulls that fill up the objects of a column, and with bytes as the text that they are.

    Items of a list are no fill, nor are values of a map, whose keys are the file's own; they are text, as in JSON.
    """
    if isinstance(value, dict) and pa.types.is_struct(kind):
        if {field.name for field in kind} == FILE:
            return value
        return {key: _plain(inner, kind.field(key).type) for key, inner in value.items() if inner is not None}
    if isinstance(value, dict) and pa.types.is_map(kind):
        return {str(_plain(key, kind.key_type)): _plain(inner, kind.item_type) for key, inner in value.items()}
    if isinstance(value, list) and _is_list(kind):
        inner = kind.value_type
        return [_plain(item, inner) for item in value] if _is_nested(inner) or _is_binary(inner) else value
    if isinstance(value, bytes) and _is_binary(kind):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in (*lists, pa.types.is_large_list_view))


def _is_nested(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or pa.types.is_map(kind) or _is_list(kind)


def cause_line(error: BaseException) -> str:
    """The first line of what a library says went wrong."""
    return str(error.__cause__ or error).strip().split("\n")[0]
