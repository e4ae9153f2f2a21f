"""What libraries say of what they read, in logs and warnings, shown as our own words are: see `errors.visible`.

They quote config.json, names of tensors and rows as they are, and write to standard error themselves. Whoever made such
a file would speak to the terminal through them.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from typing import Any, TextIO

from tuningfork.wording import visible


def show_library_words() -> None:
    """Make what is logged and warned of in this process, by whomever, plain text in lines that it cannot end; and the
    last words of an error that nobody foresaw plain text."""
    logging.setLogRecordFactory(_Record)
    warnings.showwarning = _warning
    sys.excepthook = _traceback


class _Record(logging.LogRecord):
    """A record of a log whose text is shown, whichever handler writes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.exc_info:
            self.exc_text = _lines(*self.exc_info)

    def getMessage(self) -> str:
        return visible(super().getMessage())


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(visible(str(message)), category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _traceback(*error: Any) -> None:
    print(_lines(*error), file=sys.stderr)


def _lines(*error: Any) -> str:
    return visible("".join(traceback.format_exception(*error)).rstrip("\n"), newline="\n")
