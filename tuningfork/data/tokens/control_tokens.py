"""Control tokens in a file's own words: text that spells one, such as an end of turn in what a user says.

A tokenizer reads such text as the token, wherever it stands, so that words could close a turn or open another one. What
the chat template writes is meant so; what the words spell may be an accident, or a file that was rendered before.

Control tokens are the added tokens that the tokenizer marks special or gives a task (BOS, EOS, pad), and those written
like such, <|so|>, whose mark some tokenizers lack. Tags of thoughts are none, whatever their mark, nor are other added
tokens, tags of tools or of HTML, white space: conversations write them on purpose, and decoding shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from tuningfork.data.examples.checks import says_something
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tables.json_values import loads
from tuningfork.data.tokens.printing import Printer, at_work
from tuningfork.records import Example, Message, Turns

WRITTEN = "control token written as text"
"""The start of every note and the reason of every dropped row that this file is about."""
KEPT = f"{WRITTEN}, kept"
AS_TEXT = f"{WRITTEN}, encoded as plain characters"
CUT = f"{WRITTEN} at the end of an assistant turn, where the template writes one: cut"
RENDERED = f"{WRITTEN} at the beginning of a turn, as if it had been rendered before"
ONE_END = "white space or a second end token behind the end token of an answer: cut"
ENDED = "the end token written at the end of a document: taken for its end"

_LIKE_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_OF_THOUGHTS = re.compile(r"[<\[]/?think(ing)?[>\]]", re.IGNORECASE)
_ASKED, _SAID = "xaskedx", "xsaidx"  # words of a conversation that only shows what the template writes around them


class ControlTokens:
    """The control tokens of one tokenizer, and those of them that its chat template writes around turns.

    `ends` may stand behind an assistant's words: what the template writes there, and EOS. None where it writes no
    control token there, for then a file has to bring its own. `opens` stand before the first words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        named = set(map(str, tokenizer.all_special_tokens))
        split = getattr(tokenizer, "split_special_tokens", False) or getattr(backend, "encode_special_tokens", False)
        added = [token for token in backend.get_added_tokens_decoder().values() if not (split and token.special)]
        control = [token for token in added if _is_control(token, named)]
        self.texts = [token.content for token in control]
        self.pattern = re.compile("|".join(map(_expression, sorted(control, key=lambda token: -len(token.content)))))
        self.eos = str(tokenizer.eos_token) if tokenizer.eos_token in self.texts else None
        written = list(self._around(tokenizer)) if chat else []
        behind = {token for _, token in written if token}
        self.ends = sorted(behind | ({self.eos} if self.eos else set())) if behind else []
        self.opens = sorted({token for tokens, _ in written for token in tokens} - set(self.ends))

    def _around(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[str], str]]:
        """Of two conversations: the control tokens before their first words, and the one behind an assistant's."""
        turns = (Message("user", _ASKED), Message("assistant", _SAID))
        printer = Printer(tokenizer, {})
        for text in at_work(printer, lambda: [printer.tried(turns), printer.tried(turns * 2)]):
            if text is None:
                continue
            before, _, _ = text.partition(_ASKED)
            _, _, behind = text.partition(_SAID)
            end = self.match(behind.lstrip())
            yield self.find(before), end

    def find(self, text: str) -> list[str]:
        """The control tokens that a text spells, each as often as it does, as the tokenizer finds them."""
        return self.pattern.findall(text) if self.texts else []

    def match(self, text: str) -> str:
        """The control token that a text begins with; empty where there is none."""
        found = self.pattern.match(text) if self.texts else None
        return found[0] if found else ""

    def in_words(self, example: Example) -> list[tuple[str, str]]:
        """(token, where it is written), each once, in the order of the example."""
        return list(dict.fromkeys((token, place) for place, text in _strings(example) for token in self.find(text)))

    def looks_rendered(self, example: Example) -> bool:
        """Whether the words of a turn in the prompt begin as the template begins a conversation."""
        turns = example.prompt if isinstance(example.prompt, tuple) else ()
        return any(self.match(turn.content.lstrip()) in self.opens for turn in turns)

    def with_one_end(self, example: Example) -> tuple[Example, list[str]]:
        """The example without the end markers that its assistant turns spell at their very end, and notes of them.

        The template writes the end of a turn itself, or EOS is put behind plain text, so that it would be there twice.
        What is cut is any number of such markers, with the white space behind each. Raises Unusable where a turn says
        nothing else.
        """
        if isinstance(example.prompt, str):
            return self._plain_with_one_end(example)
        if not self.ends:
            return example, []
        notes: dict[str, None] = {}

        def of(part: str, turns: Turns) -> Turns:
            return tuple(turn if turn.role != "assistant" else cut(part, turn) for turn in turns)

        def cut(part: str, turn: Message) -> Message:
            words, found = _without_ends(turn.content, self.ends)
            notes.update((f"{CUT}: {token} in {part}", None) for token in found)
            if found and not says_something(replace(turn, content=words)):
                raise Unusable(
                    "empty message" if part == "prompt" else "empty answer",
                    f"an assistant turn of {part} says only {turn.content.strip()[:80]!r}",
                )
            return replace(turn, content=words) if found else turn

        prompt = of("prompt", example.prompt)
        answers = tuple(of(answer_name(example, i), turns) for i, turns in enumerate(_turns(example)))
        return (replace(example, prompt=prompt, answers=answers) if notes else example), list(notes)

    def _plain_with_one_end(self, example: Example) -> tuple[Example, list[str]]:
        if self.eos is None:
            return example, []
        answers = tuple(map(str, example.answers))
        cut = tuple(_without_ends(text, [self.eos])[0] for text in answers)
        for place, (text, words) in enumerate(zip(answers, cut, strict=True)):
            if not words.strip() and text.strip():
                raise Unusable("empty answer", f"{answer_name(example, place)} says only {text.strip()[:80]!r}")
        more = any(text not in (words, words + self.eos) for text, words in zip(answers, cut, strict=True))
        ended = [ENDED] if cut != answers and is_document(example) else []
        return (example if cut == answers else replace(example, answers=cut)), [*ended, *([ONE_END] if more else [])]


def is_document(example: Example) -> bool:
    """Whether an example is one plain text with nothing in front of it."""
    return example.prompt == "" and len(example.answers) == 1


def _is_control(token: Any, named: set[str]) -> bool:
    text = token.content
    if not text.strip() or _OF_THOUGHTS.fullmatch(text):
        return False
    return bool(token.special or text in named or _LIKE_CONTROL.fullmatch(text))


def _expression(token: Any) -> str:
    text = re.escape(token.content)
    return rf"(?<!\w){text}(?!\w)" if token.single_word else text


def _without_ends(text: str, ends: list[str]) -> tuple[str, list[str]]:
    """A text without the markers at its end, and which they were."""
    found: list[str] = []
    stop = len(text)
    while True:
        bare = stop
        while bare and text[bare - 1].isspace():
            bare -= 1
        end = next((end for end in ends if text.endswith(end, 0, bare)), None)
        if end is None:
            return text[:stop], found
        stop = bare - len(end)
        found.append(end)


def _turns(example: Example) -> tuple[Turns, ...]:
    return cast(tuple[Turns, ...], example.answers)


def answer_name(example: Example, place: int) -> str:
    """What an answer is called: chosen or rejected of a pair, or by its number."""
    names = {1: ("answer",), 2: ("chosen", "rejected")}.get(len(example.answers))
    return names[place] if names else f"answer {place + 1}"


def _strings(example: Example) -> Iterator[tuple[str, str]]:
    """Everything that an example says, with where it says so."""
    names = ["prompt", *(answer_name(example, i) for i in range(len(example.answers)))]
    parts = cast(list[Turns | str], [example.prompt, *example.answers])
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, str):
            yield name, part
            continue
        for turn in part:
            yield f"{name} ({turn.role})", turn.content
            for key, value in turn.extra.items():
                yield from ((f"{name} ({turn.role}, {key})", text) for text in _strings_of(value))
    for key, value in example.template.items():
        place = key if key in ("tools", "documents") else f"chat_template_kwargs.{key}"
        yield from ((place, text) for text in _strings_of(value))


def _strings_of(value: Any) -> Iterator[str]:
    """The strings within a value, keys among them; of a call's arguments written as JSON those of the object, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*_strings_of(key), *_strings_of(item))
            if key == "arguments" and isinstance(item, str):
                yield from _strings_of(_object(item))


def with_changed_strings(example: Example, change: Callable[[str], str]) -> Example:
    """The example with every string that it says changed."""

    def of(part: Turns | str) -> Any:
        if isinstance(part, str):
            return change(part)
        return tuple(replace(t, content=change(t.content), extra=_changed_in(t.extra, change)) for t in part)

    answers = tuple(map(of, example.answers))
    return replace(example, prompt=of(example.prompt), answers=answers, template=_changed_in(example.template, change))


def _changed_in(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_changed_in(item, change) for item in value)
    if isinstance(value, dict):
        return {change(k) if isinstance(k, str) else k: _changed_entry(k, item, change) for k, item in value.items()}
    return value


def _changed_entry(key: Any, value: Any, change: Callable[[str], str]) -> Any:
    found = _changed_in(value, change)
    if key == "arguments" and isinstance(value, str) and (given := _object(value)) is not None:
        # JSON may spell a character by its number, which no look at the text itself finds.
        written = _changed_in(given, change)
        return found if _object(found) == written else json.dumps(written, ensure_ascii=False)
    return found


def _object(text: str) -> dict[str, Any] | None:
    """The object that a text is the JSON of."""
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
