"""The small parts that a page is put together from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tuningfork.wording import visible


def text(value: Any) -> str:
    """Anything as HTML text, or as an attribute's value."""
    return escape(visible(str(value)), quote=True)


def breakable(value: Any) -> str:
    """Anything as HTML text that breaks behind the marks that part a file's name, where a line is too short for it."""
    return re.sub(r"([/_-])(?=\w)", r"\1<wbr>", text(value))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what they stand for, both HTML already, in two columns where there is room."""
    return f'<dl class="facts">{"".join(f"<div><dt>{a}</dt><dd>{b}</dd></div>" for a, b in pairs)}</dl>'


def table(heads: Sequence[str], body: Iterable[Sequence[str]], kind: str, caption: str) -> str:
    """A table whose cells are HTML already; the first of each row is its heading.

    Each cell knows its column's heading, for a style that sets the cells of a row below each other.
    """
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    lines = []
    for first, *rest in body:
        cells = (f'<td data-head="{head}">{cell}</td>' for head, cell in zip(heads[1:], rest, strict=True))
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
