"""What files call the roles of a conversation -> what we call them.

An assistant's turn goes to the chat template as `assistant`, whatever its file calls it: templates know that name, and
print it by their own, such as `model`. Names for a tool's turn are not all printed alike. Where the template itself
asks for one of them, such as `environment`, that turn keeps its name; elsewhere it is a `tool` turn, and that is noted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuningfork.data.tables.rows import Row
from tuningfork.errors import ConfigError

Roles = Mapping[str, str]
"""A role's name in a file -> ours."""


@dataclass(frozen=True, slots=True)
class MessageNames:
    """Names in the messages of a table: what its roles are to us, and which fields, beside those of every message, the
    chat template reads."""

    roles: Roles = field(default_factory=lambda: ROLES)
    fields: frozenset[str] = frozenset()


OURS = ("system", "developer", "user", "assistant", "tool")
CALL = "tool_call"  # an assistant's turn whose content is a call
TOOL = ("observation", "environment", "function", "function_response", "tool_response", "tool_result", "ipython")
SHAREGPT = ("human", "gpt", "function_call", "observation")  # the names of that format: reading them needs no note

ROLES: Roles = {
    **{role: role for role in (*OURS, CALL)},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function_call",), CALL),
    **dict.fromkeys(TOOL, "tool"),
}
"""What is read without being told."""


def roles_for(template: Any, given: Roles) -> Roles:
    """The roles that are read where this is the tokenizer's chat template (or its templates by name, or none), and
    `data.roles` are given, which go before all others."""
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template or "")
    return {**ROLES, **{name: name for name in TOOL if _asks_for(text, name)}, **given}


def _asks_for(template: str, role: str) -> bool:
    """Whether a template compares roles with this one: role == "x", message['role'] in ["x", ...]."""
    quoted = rf"['\"]{role}['\"]"
    return re.search(rf"role['\"\])]*\s*(==\s*{quoted}|in\s*[\[(][^\[\]()]*{quoted})", template) is not None


def check_roles(given: Roles) -> None:
    """Raise ConfigError where `data.roles` names a role that is none of ours."""
    allowed = (*OURS, CALL)
    for theirs, ours in given.items():
        if ours not in allowed:
            near = difflib.get_close_matches(ours, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"ours are {', '.join(allowed)}."
            raise ConfigError(f"data.roles: {{{theirs}: {ours}}} names no role of ours; {hint}")


def named_role(message: Row) -> Any:
    """What a message calls its role, in either way to write one."""
    return message.get("role") if message.get("role") is not None else message.get("from")


def is_assistant(role: str | None) -> bool:
    """Whether a role, by our name, is the assistant's."""
    return role in ("assistant", CALL)


def is_tool(role: str | None) -> bool:
    """Whether a role, by our name or by one that the template asks for, is a tool's."""
    return role == "tool" or role in TOOL
