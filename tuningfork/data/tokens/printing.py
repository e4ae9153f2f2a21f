"""The chat template with what an example tells it: conversations -> text, and which fields of messages it reads."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tuningfork.data.examples.tools import THOUGHTS, with_object_arguments, with_text_arguments
from tuningfork.data.examples.values import Unusable, string
from tuningfork.data.tokens import bounded as bounds
from tuningfork.data.tokens.bounded import OutOfTime, Result, bounded, renew
from tuningfork.data.tokens.template_date import lines_in_front
from tuningfork.errors import DataError
from tuningfork.records import Message, Source, Turns
from tuningfork.wording import first_line

REFUSES = "the chat template refuses the conversation"
TOO_LARGE = "too large to be printed"
MEND = "Mend the template, or set data.template: none to train on plain strings as they are."
TOO_LONG = "too long to be encoded"
LONGEST = 10_000_000
"""Characters of one text. The tokenizer takes up to 300 bytes of memory for each, so more could end the whole run."""
LONGEST_TEMPLATE = 1 << 20
"""Characters of a chat template. Those in use have some ten thousand."""
LONGEST_ROW = 4 * LONGEST
"""Characters of all texts of a row, each of which is its prompt with one of its answers."""
# What the functions that print take themselves, and do not hand to the template; the messages they hand to it.
_HOW_TO_PRINT = {
    # private: transformers.render_jinja_template
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
} - {"tools", "documents"}
# What follows looks through a text once: no part of it goes on behind where another match may begin.
# A field read in a template: message.name, messages[0]["name"], message.get("name"), "name" in message.
_READ = re.compile(
    r"""(?<![\w.\])])(\w+)\s*(?:\[[^\[\]'"]*\]\s*)?(?:\.\s*get\(\s*['"](\w+)['"]|\.\s*(\w+)|\[\s*['"](\w+)['"])"""
)
_ASKED = re.compile(r"""['"](\w+)['"]\s+(?:not\s+)?in\s+(\w+)""")
_BOUND = re.compile(r"\{%[-+]?\s*(?:for\s([^{}%]*?)\sin\b|set\s+(\w+)\s*=)((?:(?!\{%).)*?)%\}", re.DOTALL)
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
        renew()
        refused: Exception | None = None
        for messages in self._messages(turns):
            try:
                printed = self._apply(messages, open_turn)
            except MemoryError:
                raise  # it is not the conversation that it refuses
            except Exception as error:  # a template is a program, and may fail as any does
                refused = refused or error
                continue
            text = string(printed, "what the chat template prints")
            if len(text) > LONGEST:
                raise Unusable(TOO_LONG, f"the chat template prints {len(text):,} characters, {LONGEST:,} at most")
            return text
        assert refused is not None, "messages have at least one writing"
        raise Unusable(REFUSES, self.complaint(refused)) from refused

    def complaint(self, error: BaseException) -> str:
        """What a template complains of, or how it fails, and in which of its lines."""
        said = first_line(error)[:300]
        if type(error) is jinja2.TemplateError:  # the template's own words, on purpose
            return said
        if not isinstance(error, jinja2.TemplateError):
            said = f"{type(error).__name__}: {said}"
        return said + self.place(error)

    @property
    def name(self) -> str:
        """What a message calls the tokenizer whose template this is."""
        return str(self.tokenizer.name_or_path or "the tokenizer")

    def place(self, error: BaseException) -> str:
        """The line of the template in which an error was raised, in words; nothing where it cannot be told."""
        found = getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateSyntaxError) else None
        at = error.__traceback__
        while at is not None:
            known = at.tb_frame.f_globals
            # private: jinja2.__jinja_exception__
            if "__jinja_exception__" in known:  # Jinja has put the template's own lines in
                found = at.tb_lineno
            # private: jinja2.__jinja_template__
            elif isinstance(template := known.get("__jinja_template__"), jinja2.Template):
                found = template.get_corresponding_lineno(at.tb_lineno)
            at = at.tb_next
        front = lines_in_front(self.tokenizer.get_chat_template(tools=self.arguments.get("tools")))
        return f" (line {found - front} of the template)" if found and found > front else ""

    def _apply(self, messages: list[dict[str, Any]], open_turn: bool) -> Any:
        if self.silence is not None and messages:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn, **self.arguments
            )
        # The same without its first steps, which take nulls out of messages and look at the first of them.
        printed: Any = render_jinja_template(  # private: transformers.render_jinja_template
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
        opener = opened[common_prefix(alone, opened) :]
        closed, followed = self.tried((asked, said)) or "", self.tried((asked, said, more)) or ""
        if said.content not in closed or not all(turn.content in followed for turn in (asked, said, more)):
            return Around(opener, "", None)
        behind, after = (text.rpartition(said.content)[2] for text in (closed, followed))
        between, lead = after.partition(more.content)[0], followed.partition(asked.content)[0]
        end = self._end_of_marker(behind, common_prefix(behind, between))
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


def at_work(printer: Printer, work: Callable[[], Result], source: Source | None = None) -> Result:
    """What `work` returns that a template does for a row, or for none at the start; its time and memory are bounded.

    Raises DataError where the template does not come to an end, and where it takes too much memory: Unusable for a row,
    and DataError at the start.
    """
    try:
        return bounded(work)
    except OutOfTime as error:
        why = f"the chat template does not come to an end within {error}{printer.place(error)}"
        where, cure = (printer.name, MEND) if source is None else (source, "Mend the template, or remove the row.")
        raise DataError(f"{where}: {why}. {cure}") from None
    except MemoryError as error:
        taken = f"more than {bounds.MEMORY >> 20:,} MiB of memory{printer.place(error)}"
        traceback.clear_frames(error.__traceback__)  # which hold that memory until Python looks for circles
        if source is None:
            raise DataError(f"{printer.name}: the chat template takes {taken}. {MEND}") from None
        raise Unusable(TOO_LARGE, taken) from None


def common_prefix(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: str, other: str) -> int:
    """Length of the common end of two texts."""
    return common_prefix(one[::-1], other[::-1])


def message_fields(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of the fields that the chat templates read of messages, and some more: none that they surely do not."""
    given = tokenizer.chat_template
    return frozenset().union(*map(_fields, given.values() if isinstance(given, dict) else (str(given),)))


@lru_cache(maxsize=16)
def _fields(template: str) -> frozenset[str]:
    others: set[str] = set()
    for targets, name, value in _BOUND.findall(template):
        roots = set(re.findall(r"(?<![\w.])\w+", value))
        if _NO_MESSAGES.search(value) or roots & others:
            others |= set(re.findall(r"\w+", targets or name))
    found = {(owner, a or b or c) for owner, a, b, c in _READ.findall(template)}
    found |= {(owner, name) for name, owner in _ASKED.findall(template)}
    others.add("loop")
    return frozenset(name for owner, name in found if owner not in others and not _NO_MESSAGES.fullmatch(owner))
