"""The chat template with what an example tells it: conversations -> text, and which fields of messages it reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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

_WORDS = "xwordsx"  # of a conversation that only shows what the template writes around them
_TAG = re.compile(r"<[^<>\s]+>")  # a marker that the tokenizer has no token for


class Around(NamedTuple):
    """What a template prints around the turns of a plain conversation.

    `opener` is what the generation prompt adds. `left_open` is the header of a next turn behind a conversation that
    ends with the assistant, which was not asked for: the assistant's, as a generation prompt has it, or the user's, as
    it stands where a user speaks first and next. `end` is the token behind an assistant's words where a user speaks
    next, empty if there is none, and None if that cannot be told.
    """

    opener: str
    left_open: str
    end: str | None


# Of a tokenizer: what its template prints around turns, by what else decides about that.
_around: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[Any, ...], Around]] = WeakKeyDictionary()


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

    @property
    def around(self) -> Around:
        """What this template prints around turns, whatever they say."""
        known = _around.setdefault(self.tokenizer, {})
        arguments = {name: value for name, value in self.arguments.items() if name not in ("tools", "documents")}
        asked = (str(self.tokenizer.chat_template), repr(arguments), self.silence)
        if asked not in known:
            known[asked] = replace(self, arguments=arguments)._printed_around()
        return known[asked]

    def opens_next(self, closed: str) -> int:
        """Length of the next turn's header at the end of `closed`, a conversation that ends with the assistant and was
        not asked to open another turn: 0 for most templates."""
        return len(self.around.left_open) if closed.endswith(self.around.left_open) else 0

    def _printed_around(self) -> Around:
        asked, said, more = (Message(role, f"{_WORDS}{i}") for i, role in enumerate(("user", "assistant", "user")))
        alone, opened = self.tried((asked,)) or "", self.tried((asked,), open_turn=True) or ""
        opener = opened[common(alone, opened) :]
        closed, followed = self.tried((asked, said)) or "", self.tried((asked, said, more)) or ""
        if said.content not in closed or not all(turn.content in followed for turn in (asked, said, more)):
            return Around(opener, "", None)
        behind, after = (text.rpartition(said.content)[2] for text in (closed, followed))
        between, lead = after.partition(more.content)[0], followed.partition(asked.content)[0]
        end = self._end_of_marker(behind, common(behind, between))
        header, next_one = behind[end:].lstrip(), between[end:].lstrip()
        if next_one.startswith(header):  # it is the user's, if it is one
            opens = lead.endswith(next_one)
        else:
            opens = opened.endswith(header) and closed.startswith(opened)
        return Around(opener, header if opens else "", self.token(between.lstrip()))

    def token(self, text: str) -> str:
        """The added token that a text begins with; empty where there is none."""
        return max((token for token in self.special if text.startswith(token)), key=len, default="")

    def _end_of_marker(self, behind: str, kept: int) -> int:
        """Where the end marker ends that `behind` begins with: a token, with EOS behind it; or else the lines that it
        keeps whoever speaks next."""
        start = len(behind) - len(behind.lstrip())
        token = self.token(behind[start:])
        tag = _TAG.match(behind, start)
        if not token and not tag:
            return behind.rfind("\n", 0, kept) + 1
        end, eos = start + len(token or tag[0]), str(self.tokenizer.eos_token)  # type: ignore[index]
        return end + len(eos) if behind.startswith(eos, end) else end


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
