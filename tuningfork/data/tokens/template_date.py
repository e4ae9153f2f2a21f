"""Chat templates that ask for the time, and how they are told one date for a whole run."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime

import jinja2
from transformers import PreTrainedTokenizerBase

_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ"  # of strftime, in Python's documentation and GNU's
# private: transformers.strftime_now
_MACRO = "{%- macro strftime_now(format) -%}"  # what a template begins with that has been told a date
_PERCENT = "\u2063percent\u2063"  # for "%%", until the directives are replaced


def prints_the_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template asks for the time, and not only whether it could ask."""
    return "strftime_now" in re.sub(r"strftime_now\s+is\s+(not\s+)?defined", "", str(tokenizer.chat_template))


def with_fixed_date(tokenizer: PreTrainedTokenizerBase, date: str) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template prints this date (2026-01-31), at midnight, whenever it is asked.

    So a run over midnight prints one date, and the template says which. Templates ask a function for the time, which
    Transformers gives them and no argument replaces; a macro of the same name, in front of the template, does.
    """
    if not prints_the_date(tokenizer):
        return tokenizer
    given = tokenizer.chat_template
    changed = copy.copy(tokenizer)
    moment = datetime.fromisoformat(date)
    changed.chat_template = (
        {name: _macro(template, moment) + template for name, template in given.items()}
        if isinstance(given, dict)
        else _macro(given, moment) + given
    )
    return changed


def lines_in_front(template: str) -> int:
    """Lines that stand in front of a template's own, where it has been told a date."""
    return 1 if template.startswith(_MACRO) else 0


def _macro(template: str, moment: datetime) -> str:
    """A macro that says the moment in a format. It knows what comes of the texts that stand in the template; in other
    formats it replaces directives one by one, and refuses those that it does not know."""
    said = {text: _moment_as(text, moment) for text in _texts(template) if "%" in text}
    anew = "format" + _replace("%%", _PERCENT)
    for directive in (f"%{flag}{letter}" for flag in ("-", "") for letter in _DIRECTIVES):
        anew += _replace(directive, moment.strftime(directive))
    return (
        f"{_MACRO}{{%- set said = {json.dumps(said)} -%}}"
        f"{{%- set anew = '' if format in said else {anew} -%}}"
        "{%- if '%' in anew %}{{ raise_exception('no known format of a date: ' ~ format) }}{% endif -%}"
        f"{{{{- said[format] if format in said else anew{_replace(_PERCENT, '%')} -}}}}"
        # The newline behind a block is not printed, and what follows it stands at the beginning of a line, as it did.
        "{%- endmacro %}\n"
    )


def _moment_as(text: str, moment: datetime) -> str:
    """The moment in a format; the text itself where it is none."""
    try:
        return moment.strftime(text)
    except ValueError:  # half a surrogate pair, or a NUL
        return text


def _texts(template: str) -> set[str]:
    """The texts in quotes that stand in a template's code."""
    try:
        tokens = list(jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(template))
    except jinja2.TemplateSyntaxError:  # it prints nothing, and says so where it is asked to
        return set()
    quoted = (value[1:-1] for _, kind, value in tokens if kind == "string")
    try:
        # As Jinja reads them.
        return {text.encode("ascii", "backslashreplace").decode("unicode-escape") for text in quoted}
    except UnicodeDecodeError:  # Jinja does not read them either
        return set()


def _replace(old: str, new: str) -> str:
    return f".replace({json.dumps(old)}, {json.dumps(new)})"
