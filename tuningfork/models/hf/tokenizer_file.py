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
from tuningfork.json_files import check_amount
from tuningfork.models.hf.folder import BESIDE_TOKENIZER, LARGEST_TOKENIZER, TOKENIZER, pointers, read_json
from tuningfork.wording import shortened

GROWTH = 32  # letters that may become of one; rules of tokenizers in use make two or three
RULES = 64  # of one kind, one after the other; tokenizers in use have ten
PIECES = 1000  # tokens and texts that a template puts together; the templates in use have five
WORD = 1000  # letters of a word that WordPiece looks into, which takes the cube of them; tokenizers in use have 100
ADDED = 60_000  # tokens beside the model's own; the most that are in use are some 30,000
LISTED = 5_000  # special tokens in lists, each of which the library looks for in all others; hundreds are in use
COMPARED = 4_000_000  # pairs of tokens that tokenizer.json lacks: the library compares them, 500,000 in a second
LAST = 1 << 22  # the largest id of a token; the library makes a token for every id below one

_SEQUENCES = {  # part of the file -> what holds the rules of a Sequence there
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_TEMPLATES = ("single", "pair")
_WHY = "a text is searched for every one of them. Use a tokenizer whose model has them in its vocabulary."


def check_tokenizer_file(folder: str) -> None:
    """Raise ModelError where a tokenizer.json, of any version, cannot be read, leaves tokens to chance or asks for more
    than anybody needs; or where the files beside it do."""
    beside, listed = _added_beside(folder)
    known = set[str]()
    for file in sorted(Path(folder).glob("tokenizer*.json")):
        if file.name != TOKENIZER:
            added = _check(file)
            if file.name == "tokenizer.json":
                known = added
            if len(added := added | beside) > ADDED:
                raise ModelError(
                    f"{file}: has {len(added):,} added tokens with those of the files beside it, {ADDED:,} at most: "
                    f"{_WHY}"
                )
    new, in_lists = (listed | beside) - known, listed - known
    if len(new) * len(in_lists) > COMPARED:
        raise ModelError(
            f"{folder}: {' and '.join(BESIDE_TOKENIZER)} name {len(new):,} tokens that no tokenizer.json has, "
            f"{len(in_lists):,} of them in lists, and the library compares each of these with all of them: "
            f"{COMPARED:,} pairs at most. Use a tokenizer.json that has them."
        )


def _added_beside(folder: str) -> tuple[set[str], set[str]]:
    """The added tokens to which the JSON files beside a tokenizer.json give ids, and the texts that they list besides.
    Raises ModelError where either are too many."""
    numbered, listed = set[str](), list[str]()
    for name in (name for name in BESIDE_TOKENIZER if (Path(folder) / name).exists()):
        content = read_json(folder, name)
        if name == "added_tokens.json":
            ids, texts = [*content.values()], [*content]
        else:
            decoder = content.pop("added_tokens_decoder", None)
            ids, texts = [*decoder] if isinstance(decoder, dict) else [], _texts(decoder)
            listed += _texts(content)
        if (wrong := next((number for number in ids if not _is_id(number)), None)) is not None:
            raise ModelError(
                f"{folder}: {name} gives a token the id {shortened(str(wrong), 40)}, and no vocabulary has so many. "
                "Get it anew."
            )
        if len(texts) > ADDED:
            raise ModelError(f"{folder}: {name} has {len(texts):,} added tokens, {ADDED:,} at most: {_WHY}")
        numbered |= {*texts}
    if len(listed) > LISTED:
        raise ModelError(
            f"{folder}: {' and '.join(BESIDE_TOKENIZER[:2])} list {len(listed):,} special tokens, {LISTED:,} at most: "
            "each is looked for among all others. List those that the chat template needs."
        )
    return numbered, {*listed}


def _is_id(number: Any) -> bool:
    try:
        return abs(int(number)) <= LAST
    except (TypeError, ValueError, OverflowError):
        return True  # the library says so best


def _texts(value: Any) -> list[str]:
    """All texts within a value of JSON; of objects their values alone."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def _check(file: Path) -> set[str]:
    """The texts of its added tokens. Raises ModelError."""
    try:
        with opened(file) as content:
            text = content.read(LARGEST_TOKENIZER + 1)
        if len(text) > LARGEST_TOKENIZER:
            raise ValueError(f"more than {LARGEST_TOKENIZER:,} bytes")
        check_amount(text)
        facts = from_json(text, cache_strings=False)
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
        raise ModelError(f"{file}: has {len(added):,} added_tokens, {ADDED:,} at most: {_WHY}")
    _check_model(file, facts.get("model"))
    for name in _SEQUENCES:
        _check_rules(file, name, facts.get(name))
    return set(_texts(added))


def _check_rules(file: Path, name: str, given: Any) -> None:
    """Refuse rules of the part `name` that are too many, or write ever longer text. Raises ModelError."""
    try:
        rules, pieces, times = _count(given), _pieces(given), growth(given)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return  # no rules that the library could read, which says so best
    if rules > RULES or pieces > PIECES:
        many = f"{rules:,} rules, {RULES}" if rules > RULES else f"a template of {pieces:,} pieces, {PIECES:,}"
        raise ModelError(f"{file}: its {name} has {many} at most. Use the model's own tokenizer.")
    if times > GROWTH:
        raise ModelError(
            f"{file}: the rules of its {name} can make more than {GROWTH} letters of one, and a row of text all of "
            "the memory. Use the model's own tokenizer."
        )


def _check_model(file: Path, model: Any) -> None:
    """Refuse tokens that are left to chance, words of any length where they are looked through again and again, and an
    id that stands for two tokens. Raises ModelError."""
    if not isinstance(model, dict):
        return
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > WORD:
        raise ModelError(
            f"{file}: its model looks into words of {longest:,} letters (max_input_chars_per_word), {WORD:,} at most: "
            "a long one would take hours. Use the model's own tokenizer."
        )
    if model.get("dropout"):
        raise ModelError(
            f"{file}: its model sets dropout to {shortened(str(model['dropout']), 40)}: the same text would get other "
            "tokens each time that it is read. Set it to null."
        )
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict) and all(type(token) is int for token in vocabulary.values()):
        texts = {token: text for text, token in vocabulary.items()}
        if len(texts) < len(vocabulary):
            one, token = next((text, token) for text, token in vocabulary.items() if texts[token] != text)
            raise ModelError(
                f"{file}: its vocabulary gives {shortened(one, 80)!r} and {shortened(texts[token], 80)!r} one id, "
                f"{token}. Get it anew."
            )


def _within(rules: Any) -> list[Any]:
    """The rules of a Sequence, of whatever kind."""
    return next((rules[key] for key in _SEQUENCES.values() if rules.get(key)), [])


def _count(rules: Any) -> int:
    """How many rules are applied one after the other."""
    if not isinstance(rules, dict):
        return 0
    return sum(map(_count, _within(rules))) if rules.get("type") == "Sequence" else 1


def _pieces(rules: Any) -> int:
    """How many tokens and texts the longest template among rules puts together."""
    if not isinstance(rules, dict):
        return 0
    if rules.get("type") == "Sequence":
        return max(map(_pieces, _within(rules)), default=0)
    if rules.get("type") != "TemplateProcessing":
        return 0
    tokens = {name: len(token["ids"]) for name, token in rules["special_tokens"].items()}
    return max(
        sum(tokens[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else 1 for piece in rules[template])
        for template in _TEMPLATES
    )


def growth(rules: Any) -> float:
    """How many letters rules can make of one, at most; Unicode's own forms are not counted.

    Raises ValueError, TypeError or LookupError where they are no such rules.
    """
    if not isinstance(rules, dict):
        return 1.0
    kind = rules.get("type")
    if kind == "Sequence":
        # Infinite rather than an OverflowError: one such rule is enough.
        return math.prod(map(growth, _within(rules)))
    if kind == "ByteLevel":
        return 2.0  # a letter for each byte, and most of those that stand for bytes have two themselves
    if kind == "TemplateProcessing":
        given = [[piece["Sequence"]["id"] for piece in rules[name] if "Sequence" in piece] for name in _TEMPLATES]
        return float(max((one.count(text) for one in given for text in set(one)), default=1))
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
        # private: re._parser
        parsed: Any = re._parser.parse(expression)  # type: ignore[attr-defined]
    except (re.error, OverflowError):
        return 0
    return int(parsed.getwidth()[0])
