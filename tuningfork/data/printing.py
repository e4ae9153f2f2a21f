"""The chat template with what an example tells it: conversations -> text, and which fields of messages it reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tuningfork.data.tools import THOUGHTS, with_object_arguments, with_text_arguments
from tuningfork.data.values import Unusable, string
from tuningfork.records import Message, Turns

REFUSES = "the chat template refuses the conversation"
# What the functions that print take themselves, and do not hand to the template; the messages they hand to it.
_HOW_TO_PRINT = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
} - {"tools", "documents"}
# A field read in a template: message.name, messages[0]["name"], message.get("name"), "name" in message.
_READ = re.compile(
    r"""(?<![\w.\])])(\w+)\s*(?:\[[^\[\]'"]*\]\s*)?(?:\.\s*get\(\s*['"](\w+)['"]|\.\s*(\w+)|\[\s*['"](\w+)['"])"""
)
_ASKED = re.compile(r"""['"](\w+)['"]\s+(?:not\s+)?in\s+(\w+)""")
_BOUND = re.compile(r"\{%[-+]?\s*(?:for\s+([\w\s,]+?)\s+in|set\s+(\w+)\s*=)\s*(.*?)%\}", re.DOTALL)
# Of these come objects that are no messages: tools, calls, documents, and what a template keeps for itself.
_NO_MESSAGES = re.compile(r"\b(?:tools?|tool_calls?|functions?|documents?|properties|parameters|items|namespace)\b")


@dataclass(eq=False)
class Printer:
    """The chat template, with what an example tells it beside the messages.

    `silence` is the content of an assistant's turn without words: no text; or null, by which DeepSeek's templates tell
    a call. Without its call such a turn has it all the same, so that a null in print is not taken for the call.
    """

    tokenizer: PreTrainedTokenizerBase
    arguments: dict[str, Any]
    silence: str | None = ""

    def __post_init__(self) -> None:
        if taken := sorted(_HOW_TO_PRINT & self.arguments.keys()):
            raise Unusable("unsupported field", f"chat_template_kwargs.{taken[0]} is no argument of a template")
        self.printed: dict[tuple[Turns, bool], str] = {}  # one turn's end is often another's beginning

    def __call__(self, turns: Turns, open_turn: bool = False) -> str:
        """The conversation as the template prints it; open_turn adds the generation prompt. Raises Unusable."""
        if (turns, open_turn) not in self.printed:
            self.printed[turns, open_turn] = self._print(turns, open_turn)
        return self.printed[turns, open_turn]

    def tried(self, turns: Turns, open_turn: bool = False) -> str | None:
        """The conversation as the template prints it, or None where it refuses it."""
        try:
            return self(turns, open_turn)
        except Unusable:
            return None

    @cached_property
    def special(self) -> list[str]:
        """The texts of the tokenizer's added tokens: thousands for some, so not asked for where they do not matter."""
        return [token.content for token in self.tokenizer.added_tokens_decoder.values()]

    @cached_property
    def thought(self) -> str:
        """The name that this template has for an assistant's thoughts; the usual one where it has none."""
        template = self.tokenizer.get_chat_template(tools=self.arguments.get("tools"))
        names = (name for name in THOUGHTS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
        return next(names, THOUGHTS[0])

    def _print(self, turns: Turns, open_turn: bool) -> str:
        refused: Exception | None = None
        for messages in self._messages(turns):
            try:
                return string(self._apply(messages, open_turn), "what the chat template prints")
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                refused = refused or error
        raise Unusable(REFUSES, str(refused)[:300]) from refused

    def _apply(self, messages: list[dict[str, Any]], open_turn: bool) -> Any:
        if self.silence is not None and messages:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn, **self.arguments
            )
        # The same without its first steps, which take nulls out of messages and look at the first of them.
        printed: Any = render_jinja_template(
            [messages],
            chat_template=self.tokenizer.get_chat_template(tools=self.arguments.get("tools")),
            add_generation_prompt=open_turn,
            **(self.tokenizer.special_tokens_map | self.arguments),
        )
        return printed[0][0]

    def _messages(self, turns: Turns) -> Iterator[list[dict[str, Any]]]:
        """The turns as the template takes them. Arguments of calls are objects for most templates, which write JSON of
        them. Those that put text together cannot take an object, and get JSON text."""
        called = any("tool_calls" in turn.extra for turn in turns)
        for change in (with_object_arguments, with_text_arguments) if called else (None,):
            messages = []
            for turn in turns:
                extra = {self.thought if key == THOUGHTS[0] else key: value for key, value in turn.extra.items()}
                if change is not None and "tool_calls" in extra:
                    extra["tool_calls"] = change(extra["tool_calls"])
                content = self.silence if turn.role == "assistant" and not turn.content else turn.content
                messages.append({"role": turn.role, "content": content, **extra})
            yield messages

    def opens_next(self, turns: Turns, opened: str, closed: str) -> int:
        """Length of the next turn's header at the end of `closed`, which was not asked for one: 0 for most templates.

        `turns` are those that `closed` prints, and `opened` are those before the last with its generation prompt. A
        template that opens an assistant turn behind every conversation ends both with the same header, and takes it
        back where a user speaks next; what it takes back of a closed conversation is an end marker, in no other's lead.
        """
        alike = closed[len(closed) - common_end(opened, closed) :]
        if not alike.strip() or not closed.startswith(opened):
            return 0
        followed = self.tried((*turns, Message("user", "0")))
        if followed is None or followed.startswith(closed.rstrip()):
            return 0
        if header := common_end(self.tried(()) or "", alike):  # of no turns: the header alone, and maybe a BOS
            return header
        # The end marker is one special token; without any, the header has a line of its own.
        start, kept = len(closed) - len(alike), common(followed, closed)
        ends = (closed.find(token, start) + len(token) for token in self.special if token in closed[start:kept])
        line = max(closed.rfind("\n", start, kept) + 1, start)
        return len(closed) - min((end for end in ends if end <= kept), default=line)


def common(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(one: str, other: str) -> int:
    """Length of the common end of two texts."""
    return common(one[::-1], other[::-1])


def message_fields(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of the fields that the chat templates read of messages, and some more: none that they surely do not."""
    given = tokenizer.chat_template
    return frozenset().union(*map(_fields, given.values() if isinstance(given, dict) else (str(given),)))


@lru_cache(maxsize=16)
def _fields(template: str) -> frozenset[str]:
    others = {"loop"}
    for targets, name, value in _BOUND.findall(template):
        roots = set(re.findall(r"(?<![\w.])\w+", value))
        if _NO_MESSAGES.search(value) or (roots & others - {"loop"}):
            others |= set(re.findall(r"\w+", targets or name))
    found = {(owner, a or b or c) for owner, a, b, c in _READ.findall(template)}
    found |= {(owner, name) for name, owner in _ASKED.findall(template)}
    return frozenset(name for owner, name in found if owner not in others and not _NO_MESSAGES.fullmatch(owner))
