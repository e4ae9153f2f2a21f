"""Where the turns to learn lie in the printing of a whole conversation: from behind their header to their end marker.

The template does not tell which characters came from which turn. Where the conversation printed up to a turn, with its
generation prompt, and then with the turn, each continue the one before, that shows it. A template may print earlier
turns otherwise once others follow: then numbers in place of what turns say show where each turn's words end, and what
stands behind them is compared with how the conversation goes on there as long as nothing follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tuningfork.data.examples.conversations import OPENING
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.marks import Marks
from tuningfork.data.tokens.printing import Printer, common_prefix, common_suffix
from tuningfork.records import Turns

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

REWRITES = "the chat template prints earlier turns otherwise"
REOPENS = "the generation prompt is not how the turn is printed"


@dataclass(frozen=True, slots=True)
class Found:
    """Where an assistant turn lies. `short` are the characters at the end of its generation prompt, `opening`, that the
    whole printing does not have there. `others` are those within the turn that say what tools answered, if there are
    any: some templates print the words beside a call behind that."""

    place: int
    start: int
    stop: int
    short: int = 0
    opening: str = ""
    note: str = ""
    others: Span | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """The characters that the turn says."""
        if self.others is None:
            return ((self.start, self.stop),)
        return (self.start, self.others[0]), (self.others[1], self.stop)


class Finder:
    """Finds the assistant turns of one conversation in its whole printing."""

    def __init__(self, turns: Turns, printer: Printer) -> None:
        self.turns, self.printer = turns, printer
        self.whole = printer(turns)

    @cached_property
    def marks(self) -> Marks:
        """Numbers in place of what turns say."""
        return Marks(self.turns, self.printer.arguments)

    def find(self, place: int) -> Found:
        """The turn at a place. Raises Unusable where it cannot be told where it begins and ends, or which of what is
        printed within it another one says."""
        found = self._find(place)
        if self._calls_and_speaks(place):
            found = self._without_others(found)
        header = self.printer.around.opener
        if header and self.whole.startswith(header, found.start) and not self.opening(found):
            return replace(found, start=found.start + len(header))  # the generation prompt lacks it here
        return found

    def _calls_and_speaks(self, place: int) -> bool:
        """Whether a turn has words beside calls, with more behind it, which may be printed between the two."""
        turn = self.turns[place]
        return bool(turn.extra.get("tool_calls") and turn.content.strip()) and place + 1 < len(self.turns)

    def _without_others(self, found: Found) -> Found:
        """The turn without what tools answer within it. Raises Unusable where something else may be within."""
        place = found.place
        others = self._answered_within(found) if self.turns[place + 1].role == "tool" else None
        if others is not None:
            return replace(found, others=others) if others[0] < others[1] else found
        text = self.printer.tried(self.marks.turns) or ""
        at = [text.find(mark.text) for mark in self.marks.all if mark.place == place and mark.text in text]
        for other in self.marks.all:
            if at and other.place != place and min(at) < text.find(other.text) < max(at):
                raise Unusable(REWRITES, f"and prints message {other.place + 1} within message {place + 1}")
        return found

    def _answered_within(self, found: Found) -> Span | None:
        """What tools say between a turn's calls and its words, which may be nothing. None where that cannot be told,
        as where the words stand before the calls."""
        place, turn, marked = found.place, self.turns[found.place], self.marks.turns[found.place]
        word = marked.content.strip()
        if [mark.text for mark in self.marks.all if mark.place == place and mark.text in marked.content] != [word]:
            return None
        worded, before = replace(turn, content=word), self.turns[:place]
        rest = self.marks.only([p for p, other in enumerate(self.turns) if other.role == "assistant"])[place + 1 :]
        every, later = self.printer.tried((*before, marked, *rest)), self.printer.tried((*before, worded, *rest))
        alone = self.printer.tried((*before, worded))
        if every is None or later is None or alone is None or word not in later or word not in alone:
            return None
        called = len(later) - common_suffix(later, every)  # the calls' last words end here
        words, words_alone = later.index(word), alone.index(word)
        if not called <= words or not self.whole.startswith(later[:words]) or not alone.startswith(later[:called]):
            return None
        start = called + self._not_within_a_token(
            self.whole[called:], common_prefix(alone[called:words_alone], self.whole[called:])
        )
        stop = words - common_suffix(alone[start:words_alone], self.whole[start:words])
        end_marker = alone[words_alone + len(word) :].rstrip()
        if end_marker and self.whole.startswith(end_marker, start):
            start += len(end_marker)
        return (start, stop) if found.start <= called <= start <= stop <= found.stop else None

    def _find(self, place: int) -> Found:
        before, upto = self.turns[:place], self.turns[: place + 1]
        opened, closed = self.printer(before, open_turn=True), self.printer(upto)
        closed = closed[: len(closed) - self.printer.opens_next(closed)]
        if self.whole.startswith(closed) and closed.startswith(opened):
            piece = closed[len(opened) :]
            return Found(place, len(opened), len(opened) + self._counted(place, piece))
        note = REOPENS if self.whole.startswith(closed) else REWRITES
        # System messages may move with the last user turn. A template may look at what the others say: then their
        # words stay, and are printed alike.
        heard = [p for p, turn in enumerate(self.turns) if turn.role not in OPENING]
        spoken = [p for p in heard if self.turns[p].role == "assistant"]
        for places in (heard, spoken):
            found = self._among(place, self.marks.only(places), opened, closed)
            if found is not None:
                return replace(found, note=note)
        text = self.printer.tried(self.marks.turns) or ""
        twice = next((m for m in self.marks.all if text.count(m.text) > 1), None)
        if twice is not None:
            times = text.count(twice.text)
            raise Unusable(REWRITES, f"and prints the {twice.field} of message {twice.place + 1} {times} times")
        raise Unusable(REWRITES, f"and where message {place + 1} begins and ends cannot be told")

    def _counted(self, place: int, piece: str) -> int:
        """Length of a printed turn without the white space behind its end marker. White space that its own content ends
        with stays where no marker follows it."""
        content = self.turns[place].content
        end = piece.find(content) + len(content)
        own = content in piece and not piece[end:].strip() and content != content.rstrip()
        return end if own and not self._is_closed(place, piece) else len(piece.rstrip())

    def _is_closed(self, place: int, piece: str) -> bool:
        """Whether an end marker stands behind the words of a printed turn, though these may read like one themselves:
        then words whose white space is not printed, and the marker with the template's, look like the content."""
        word = next((mark.text for mark in self.marks.all if mark.place == place and mark.field == "content"), None)
        if word is None:
            return bool(piece.strip())
        printed = self.printer.tried((*self.turns[:place], self.marks.turns[place])) or ""
        return bool(printed[: len(printed) - self.printer.opens_next(printed)].rpartition(word)[2].strip())

    def opening(self, found: Found) -> str:
        """What the generation prompt adds to the conversation before a turn."""
        before = self.turns[: found.place]
        opened = self.printer(before, open_turn=True)
        return opened[common_prefix(self.printer(before), opened) :]

    def merges(self, found: Found) -> bool:
        """Whether white space that a turn begins with follows on white space of its header: one token may have both."""
        return self.whole[found.start - 1 : found.start + 1].isspace() and found.start > 0

    def uncut(self, opening: str, end: int) -> int:
        """The end of a generation prompt's part, moved to the front of white space behind a special token where the
        part ends within white space or may: there are tokens that hold more of it."""
        bare = len(opening[:end].rstrip())
        return bare if any(opening[:bare].endswith(token) for token in self.printer.special) else end

    def _among(self, place: int, marked: Turns, opened: str, closed: str) -> Found | None:
        """The turn at a place, by numbers in place of what turns say; None where they change more than that."""
        begins = self._gap(place, marked)
        ends = self._gap(place + 1, marked)
        opened_marked = self.printer.tried(marked[:place], open_turn=True)
        closed_marked = self.printer.tried(marked[: place + 1])
        if begins is None or ends is None or opened_marked is None or closed_marked is None:
            return None
        lead = opened[len(opened) - common_suffix(opened, opened_marked) :]
        tail = self.printer(self.turns[: place + 1])
        tail = tail[len(tail) - common_suffix(tail, closed_marked) :]
        tail = tail[: len(tail) - (len(self.printer(self.turns[: place + 1])) - len(closed))]
        if begins >= ends or not any(mark.place == place for mark in self.marks.all):
            return None
        start = begins + self._not_within_a_token(lead, common_prefix(lead, self.whole[begins:]))
        stop = ends + self._end_marker(tail, self.whole[ends:])
        short = len(lead) - (start - begins)
        opening = self.opening(Found(place, start, stop)) if short else ""
        if short > len(opening):  # what stands before is closed otherwise here
            at = self.whole.rfind(opening, begins, ends) if begins else -1
            if at < 0:
                return None
            start, short = (at + len(opening) if opening else start), 0
        return Found(place, start, stop, short) if start <= ends else None

    def _gap(self, place: int, marked: Turns) -> int | None:
        """Where in the whole printing the words of the turns before a place end; None where that cannot be told."""
        if place == 0:
            return 0
        every, later = self.printer.tried(marked), self.printer.tried((*self.turns[:place], *marked[place:]))
        if every is None or later is None:
            return None
        end = len(later) - common_suffix(later, every)
        return end if self.whole.startswith(later[:end]) else None

    def _end_marker(self, tail: str, after: str) -> int:
        """Length of the end marker in `after`, which stands behind a turn, where `tail` closes it as the last one.

        That is what they have in common, up to a special token that they have not; or else one special token, where
        another one closes the conversation, unless it is known to be none that closes a turn.
        """
        end = self._not_within_a_token(tail, common_prefix(tail.rstrip(), after))
        first = [self.printer.token(text) for text in (tail, after)]
        other = all(first) and self.printer.around.end in (first[1], None)
        return len(tail[:end].rstrip()) or (len(first[1]) if other else 0)

    def _not_within_a_token(self, text: str, end: int) -> int:
        """The end of a text's part, moved to the front of a special token that it cuts."""
        for token in self.printer.special:
            at = text.find(token, max(0, end - len(token) + 1))
            if 0 <= at < end < at + len(token):
                end = at
        return end


class Located(NamedTuple):
    """The turns that count in one answer's whole printing, and where the last of its turns ends."""

    finder: Finder
    turns: list[Found]


def evened(answers: Sequence[Located]) -> list[list[Found]]:
    """The turns of all of an example's answers, with headers that are the same for all that are opened alike.

    What a generation prompt forces, such as an opened thought, is a header where every turn begins with it. Where one
    does not, it counts in all of them, for what stands in its place counts there.
    """
    if not any(turn.short or answer.finder.merges(turn) for answer in answers for turn in answer.turns):
        return [answer.turns for answer in answers]
    known = [(answer.finder, replace(t, opening=answer.finder.opening(t))) for answer in answers for t in answer.turns]
    kept: dict[str, int] = {}
    for finder, turn in known:
        shared = len(turn.opening) - turn.short
        if turn.short or finder.merges(turn):
            shared = finder.uncut(turn.opening, shared)
        kept[turn.opening] = min(shared, kept.get(turn.opening, shared))
    even = iter(replace(t, start=t.start - (len(t.opening) - t.short - kept[t.opening])) for _, t in known)
    return [[next(even) for _ in answer.turns] for answer in answers]
