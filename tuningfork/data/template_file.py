"""`data.template` as a file: a chat template in place of the tokenizer's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuningfork.data.config import CHAT, NO_TEMPLATE, DataConfig
from tuningfork.errors import DataError
from tuningfork.wording import from_here

if TYPE_CHECKING:  # a recipe is checked before that is imported
    from transformers import PreTrainedTokenizerBase

LARGEST = 1 << 20  # bytes


def with_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> DataConfig:
    """Give the tokenizer the chat template of the file that `data.template` names, if it names one. The settings that
    come back are those of a tokenizer whose own it is, for what it says counts, not where it lies. Raises DataError."""
    text = read_template(data.template)
    if text is None:
        return data
    tokenizer.chat_template = text
    return replace(data, template=CHAT)


def read_template(name: str) -> str | None:
    """The text of the file that `data.template` names, None where it names none. Raises DataError."""
    if name in (CHAT, NO_TEMPLATE):
        return None
    path = Path(name)
    if not path.is_file():
        raise DataError(
            f"data.template {name}: there is no such file. Give {CHAT}, {NO_TEMPLATE} or a .jinja "
            f"file.{from_here(path)}"
        )
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"data.template {name}: cannot be read ({error.strerror}). Check its rights.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.template {name}: is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    if len(content) > LARGEST or not text.strip():
        what = "is empty" if not text.strip() else f"has more than {LARGEST:,} bytes, so it is no chat template"
        raise DataError(f"data.template {name}: {what}.")
    return text
