"""Control tokens in a file's own words as plain characters, while those that the template writes stay control tokens.

Both are spelled alike, so two steps keep them apart. In the words every control token is exchanged for a name of as
many private characters, and the template prints that: now what is spelled out is the template's, and what has a name is
the words'. Then the two are exchanged for each other, and the text is read by a copy of the tokenizer that knows its
control tokens by those names and has the same ids for them: to it, what the words spell is text like any other. So the
whole text is still read at once, normalized, split and merged as ever; without control tokens in the words the ids are
the tokenizer's own. Names are as long as what they stand for, so places in the text are the same in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.bounded import OutOfTime
from tuningfork.data.tokens.control_tokens import WRITTEN, ControlTokens, with_changed_strings
from tuningfork.data.tokens.in_time import in_time
from tuningfork.data.tokens.template import RenderedExample, Span
from tuningfork.data.tokens.tokenize import FAILS, allowed, naming, too_slow
from tuningfork.errors import DataError, is_panic
from tuningfork.records import Example

_FIRST = 0xF0000  # of a private area that has 65,534 characters, none of which any script or emoji uses
_NAMED = re.compile("[\U000f0000-\U000ffffd]")


class AsText:
    """Prints and encodes examples with the control tokens in their words as plain characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self.tokenizer, self.control = tokenizer, control
        self.names = {token: chr(_FIRST + i) * len(token) for i, token in enumerate(control.texts)}
        self.tokens = {name: token for token, name in self.names.items()}
        self.name = re.compile("|".join(self.tokens))
        self.either = re.compile(f"{control.pattern.pattern}|{self.name.pattern}")
        self.exchange = {**self.names, **self.tokens}

    def __call__(self, example: Example, render: Callable[[Example], RenderedExample]) -> RenderedExample:
        """The example as `render` prints it, with the tokens of its texts.

        Raises Unusable where the template looks into the words that it prints, or where the tokenizer cannot write
        them as plain characters; DataError where it does not come to an end.
        """
        shown, named = render(example), render(with_changed_strings(example, self._named))
        if any(map(_NAMED.search, shown.texts)):
            raise Unusable(WRITTEN, "and the row has private characters (U+F0000 and on), which stand for it here")
        if tuple(map(self._spelled, named.texts)) != shown.texts:
            raise Unusable(WRITTEN, "and the chat template prints other words in its place otherwise")
        try:
            return replace(named, texts=shown.texts, tokens=tuple(map(self._read, named.texts)))
        except OutOfTime as error:
            raise too_slow(self.tokenizer, example.source, error) from None

    def _named(self, text: str) -> str:
        return self.control.pattern.sub(lambda found: self.names[found[0]], text)

    def _spelled(self, text: str) -> str:
        return self.name.sub(lambda found: self.tokens[found[0]], text)

    def _read(self, named: str) -> tuple[list[int], list[Span]]:
        """Ids and characters of each token of a text in which the words' control tokens have their names."""
        exchanged = self.either.sub(lambda found: self.exchange[found[0]], named)
        twin = self.twin
        try:
            with naming(self.tokenizer):
                # As a batch of one, for alone it would let no other thread run.
                encode = partial(twin.encode_batch, [exchanged], add_special_tokens=False)
                [encoding] = in_time(encode, allowed([exchanged]))
        except DataError as error:
            raise Unusable(FAILS, str(error)) from error
        ids, offsets = np.array(encoding.ids), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        covered = _covered(offsets, len(named))
        unfit = _covered(offsets[np.isin(ids, self.unfit)], len(named))
        for found in self.name.finditer(named):
            token, (start, stop) = self.tokens[found[0]], found.span()
            written = all(covered[start + i] for i, letter in enumerate(token) if not letter.isspace())
            if not written or unfit[start:stop].any():
                raise Unusable(WRITTEN, f"and the tokenizer has no plain characters for {token}")
        return encoding.ids, encoding.offsets

    @property
    def twin(self) -> Tokenizer:
        """The tokenizer with other names for its control tokens. Raises Unusable where it cannot be made."""
        if isinstance(self._twin, str):
            raise Unusable(WRITTEN, self._twin)
        return self._twin

    @cached_property
    def _twin(self) -> Tokenizer | str:
        """It, or why there is none. Made when it is needed, as that takes seconds for a large vocabulary."""
        backend: Any = self.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        facts = json.loads(backend.to_str())
        # Nothing is to be added, and white space trimmed from a token's characters would hide that it has them.
        facts |= {"post_processor": None, "truncation": None, "padding": None}
        for token in facts["added_tokens"]:
            token["content"] = self._renamed(token["content"])
        model = facts["model"]
        if isinstance(vocabulary := model["vocab"], dict):
            model["vocab"] = {self._renamed(piece): number for piece, number in vocabulary.items()}
        else:
            model["vocab"] = [[self._renamed(piece), score] for piece, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._renamed(model["unk_token"])
        try:
            # private: tokenizers.Tokenizer.to_str
            twin: Any = Tokenizer.from_str(json.dumps(facts))
        except BaseException as error:  # the library has no type of its own for these
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return f"and the tokenizer cannot do without it: {str(error)[:200]}"
        if any(twin.token_to_id(name) != backend.token_to_id(token) for token, name in self.names.items()):
            return "and the tokenizer has no fixed ids for its control tokens"
        twin.encode_special_tokens = getattr(self.tokenizer, "split_special_tokens", False) is True
        return twin  # type: ignore[no-any-return]

    @cached_property
    def unfit(self) -> list[int]:
        """Ids that stand for no characters: those of the control tokens, and the one for what is unknown."""
        backend: Any = self.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        unknown = getattr(backend.model, "unk_token", None)
        ids = [backend.token_to_id(token) for token in (*self.names, *([unknown] if unknown is not None else []))]
        return [*ids, *([backend.model.unk_id] if getattr(backend.model, "unk_id", None) is not None else [])]

    def _renamed(self, token: str) -> str:
        return self.names.get(token, token)


def _covered(offsets: np.ndarray, characters: int) -> np.ndarray:
    """bool [characters]: which of a text's characters lie in tokens, of whose offsets, int64 [n, 2], each is one. A
    token that covers nothing stands for the character behind it."""
    begins = np.bincount(offsets[:, 0], minlength=characters + 2)
    ends = np.bincount(np.maximum(offsets[:, 1], offsets[:, 0] + 1), minlength=characters + 2)
    return (np.cumsum(begins - ends) > 0)[:characters]
