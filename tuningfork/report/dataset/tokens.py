"""Examples token by token, as HTML: borders, special tokens, what counts, and the id of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tuningfork.data.summary.records import Part, Piece, ShownExample
from tuningfork.report.dataset.html import text
from tuningfork.report.dataset.wording import cut, rows
from tuningfork.wording import counted, visible

_TEXT = 200  # characters shown of one token


def examples(shown: Sequence[ShownExample], names: Mapping[str, str]) -> str:
    """Every shown example, its prompt first and its answers below; `names` say what to call their files."""
    several = any(len(example.answers) > 1 for example in shown)
    keys = {
        "prompt": "prompt",
        "chosen": f"{'chosen answer' if several else 'answer'}, counts in the loss",
        **({"rejected": "rejected answer, counts in the loss"} if several else {}),
        "silent": "in an answer, does not count",
        "special": "special token",
    }
    drawn = "".join(f'<span><span class="key {key}"></span>{words}</span>' for key, words in keys.items())
    legend = (
        f'<p class="legend">{drawn}</p>'
        '<p class="legend"><label><input type="checkbox" id="ids"> show token ids</label> '
        "Hovering over a token shows its id, too.</p>"
    )
    return legend + "".join(_example(example, names) for example in shown)


def _example(example: ShownExample, names: Mapping[str, str]) -> str:
    answers = [_part(part, "rejected" if place else "chosen") for place, part in enumerate(example.answers)]
    parts = "".join([_part(example.prompt, "prompt"), *answers])
    title = example.title
    return (
        f"<h3>{escape(title[:1].upper() + title[1:])} <span class='soft'>{text(rows([example], names))}</span></h3>"
        f'<div class="example">{parts}</div>'
    )


def _part(part: Part, kind: str) -> str:
    name = part.name
    length = counted(part.tokens, "token")
    if kind != "prompt":
        length += f", {counted(part.counted, 'counts in the loss', 'count in the loss')}"
    pieces = "".join(_piece(piece, kind) for piece in part.head)
    if part.hidden:
        pieces += f'<span class="hidden">… {part.hidden:,} more tokens …</span>'
        pieces += "".join(_piece(piece, kind) for piece in part.tail)
    return (
        f'<div class="said"><h4>{name.capitalize()} <span class="soft">{length}</span></h4>'
        f'<p class="tokens" tabindex="0" role="group" aria-label="Tokens of the {name}">{pieces.rstrip()}</p></div>'
    )


def _piece(piece: Piece, kind: str) -> str:
    kind = kind if piece.counted or kind == "prompt" else "silent"
    kind += " special" if piece.special else ""
    ids = " ".join(map(str, piece.ids))
    shown = escape(visible(cut(piece.text, _TEXT), newline="↵\n"))
    # A line that a token ends is broken behind it: a border within would stand on the next line.
    broken = "\n" if shown.endswith("\n") else ""
    return f'<span class="t {kind}" title="{ids}">{shown.removesuffix(broken)}</span>{broken}'
