"""Chat templates that ask for the time, and how they are told one date for a whole run."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime

from transformers import PreTrainedTokenizerBase

# Of strftime, in Python's documentation and GNU's. "%%" comes first, as a mark, and is put back in the end.
_DIRECTIVES = [f"%{sign}{letter}" for sign in ("-", "") for letter in "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZf"]
_PERCENT = "\u2063"


def prints_the_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template asks for the time, and not only whether it could ask."""
    return "strftime_now" in re.sub(r"strftime_now\s+is\s+(not\s+)?defined", "", str(tokenizer.chat_template))


def at_date(tokenizer: PreTrainedTokenizerBase, date: str) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template prints this date (2026-01-31), at midnight, whenever it is asked.

    So a run over midnight prints one date, and the template says which. Templates ask a function for the time, which
    Transformers gives them and no argument replaces; a macro of the same name, in front of the template, does.
    """
    if not prints_the_date(tokenizer):
        return tokenizer
    moment = datetime.fromisoformat(date)
    text = "format" + _replace("%%", _PERCENT)
    for directive in _DIRECTIVES:
        text += _replace(directive, moment.strftime(directive))
    # The newline behind a block is not printed, and what follows it stands at the beginning of a line, as it did.
    macro = f"{{%- macro strftime_now(format) -%}}{{{{- {text}{_replace(_PERCENT, '%')} -}}}}{{%- endmacro %}}\n"
    given = tokenizer.chat_template
    changed = copy.copy(tokenizer)
    changed.chat_template = (
        {name: macro + template for name, template in given.items()} if isinstance(given, dict) else macro + given
    )
    return changed


def _replace(old: str, new: str) -> str:
    return f".replace({json.dumps(old)}, {json.dumps(new)})"
