"""JSON files that are no JSON, or more of it than anybody has: an error in words, at once."""

import json
import os
from pathlib import Path

import pytest

from tests.bounds import within, without_much_memory
from tuningfork.json_files import LARGEST, LONGEST_NAME, MOST_LEVELS, as_object, read_object


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"[]", "it holds no JSON object"),
        (b"3", "it holds no JSON object"),
        (b"{", "Expecting property name"),
        (b'{"a": 1', "Expecting ',' delimiter"),
        (b"\0\0\0\0", "Expecting value: line 1 column 1"),
        (b'{"a": "\0"}', "Invalid control character"),
        (b"\xff\xfe{\0}\0", "can't decode byte 0xff in position 0"),
        (b"\xef\xbb\xbf{}", "UTF-8 BOM"),
        (b'{"a": "\xe9"}', "can't decode byte 0xe9 in position 7"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": 1, "a": 2}', "an object gives 'a' two values"),
        (b'{"' + b"n_" * 501 + b'": 1}', "a name of 1,002 letters, 1,000 at most: 'n_n_"),
        (b'{"a": [{"' + b"b" * 1001 + b'": 1}]}', "a name of 1,001 letters, 1,000 at most"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "lie in each other more than 64 times"),
        (b'{"a":' * 500 + b"{}" + b"}" * 500, "lie in each other more than 64 times"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with within(20), pytest.raises(ValueError, match=said):
        read_object(tmp_path / "file.json")


def test_depth_is_counted_in_objects_and_lists_alike() -> None:
    def nested(levels: int) -> bytes:
        text = "0"
        for level in range(levels - 1):
            text = f"[{text}]" if level % 2 else f'{{"a": {text}}}'
        return f'{{"a": {text}, "b": [1, 2]}}'.encode()

    assert as_object(nested(MOST_LEVELS))["b"] == [1, 2]
    with pytest.raises(ValueError, match="more than 64 times"):
        as_object(nested(MOST_LEVELS + 1))


def test_the_number_of_values_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(b'{"a": [' + b"{}," * 11_000_000 + b"{}]}")
    with within(20), without_much_memory(1 << 29), pytest.raises(ValueError, match="more than 10,000,000 values"):
        read_object(tmp_path / "file.json")


def test_the_longest_name_is_read() -> None:
    assert as_object(b'{"' + b"a" * LONGEST_NAME + b'": 1}') == {"a" * LONGEST_NAME: 1}


def test_a_name_that_is_given_one_value_twice_is_read() -> None:
    assert as_object(b'{"a": {"b": [1]}, "a": {"b": [1]}}') == {"a": {"b": [1]}}


def test_the_size_of_a_file_is_bounded_and_it_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(LARGEST + 1)  # without a byte on the disk
    with pytest.raises(ValueError, match="it has more than 67,108,864 bytes"):
        read_object(tmp_path / "large.json")
    os.mkfifo(tmp_path / "pipe.json")
    with within(20), pytest.raises(OSError, match="it is a named pipe, not a file"):
        read_object(tmp_path / "pipe.json")
    with pytest.raises(IsADirectoryError):
        read_object(tmp_path)
    (tmp_path / "whole.json").write_text(json.dumps({"é": [1.5, None]}))
    assert read_object(tmp_path / "whole.json") == {"é": [1.5, None]}
