"""What a tokenizer.json asks for, looked at before it is obeyed: rules that write ever longer text, endless tokens.

The library that reads it has no bound of its own: a few rules, each of which writes a letter ten times, take all memory
as soon as one word is read, and that ends the process.
"""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tuningfork.errors import ModelError
from tuningfork.files import opened
from tuningfork.models.folder import pointers

GROWTH = 32  # letters that may become of one; rules of tokenizers in use make two or three
ADDED = 65_000  # tokens beside the model's own; the most that are in use are some 30,000


def check_tokenizer_file(folder: str) -> None:
    """Raise ModelError where a tokenizer.json, of any version, cannot be read or asks for more than anybody needs."""
    for file in sorted(Path(folder).glob("tokenizer*.json")):
        if file.name != "tokenizer_config.json":
            _check(file)


def _check(file: Path) -> None:
    try:
        with opened(file) as content:
            facts = from_json(content.read(), cache_strings=False)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}). Get it anew.") from error
    except ValueError as error:
        raise ModelError(
            f"{file}: is not JSON ({str(error)[:200]}). Get it anew.{pointers(str(file.parent))}"
        ) from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: holds no JSON object. Get it anew.")
    added = facts.get("added_tokens")
    if isinstance(added, list) and len(added) > ADDED:
        raise ModelError(
            f"{file}: has {len(added):,} added_tokens, {ADDED:,} at most: a text is searched for every one of them. "
            "Use a tokenizer whose model has them in its vocabulary."
        )
    for name in ("normalizer", "decoder"):
        try:
            times = growth(facts.get(name))
        except (ValueError, TypeError, LookupError, RecursionError):
            continue  # no rules that the library could read, which says so best
        if times > GROWTH:
            raise ModelError(
                f"{file}: the rules of its {name} can make more than {GROWTH} letters of one, and a row of text all of "
                "the memory. Use the model's own tokenizer."
            )


def growth(rules: Any) -> float:
    """How many letters rules of a normalizer or decoder can make of one, at most; Unicode's own forms are not counted.

    Raises ValueError, TypeError or LookupError where they are no such rules.
    """
    if not isinstance(rules, dict):
        return 1.0
    kind = rules.get("type")
    if kind == "Sequence":
        # Infinite rather than an OverflowError: one such rule is enough.
        return math.prod(map(growth, rules.get("normalizers") or rules.get("decoders") or ()))
    if kind == "Prepend":
        return 1.0 + len(rules["prepend"])
    if kind == "Replace":
        pattern, written = rules["pattern"], len(rules["content"])
        shortest = len(pattern["String"]) if "String" in pattern else _shortest(pattern["Regex"])
        return max(1.0, written / shortest) if shortest else 1.0 + written
    if kind == "Precompiled":
        table = base64.b64decode(rules["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :]  # behind the search tree, of that many bytes
        return float(max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=1) or 1)
    return 1.0


def _shortest(expression: str) -> int:
    """Letters of the shortest text that an expression can match. As far as Python reads it, else 0: it may be none."""
    try:
        parsed: Any = re._parser.parse(expression)  # type: ignore[attr-defined]
    except (re.error, OverflowError):
        return 0
    return int(parsed.getwidth()[0])
