"""Where a text can be cut so that its two parts, encoded apart, give the tokens of the whole: a prompt is encoded once
for all of its answers.

A tokenizer takes its added tokens out of a text first, and normalizes, splits and merges each piece between them by
itself. So the text may be cut in front of an added token, whatever stands on either side, as long as nothing else could
have been found there that reaches over the cut. The token stays in front of the second part, so that no piece of it
looks like the beginning of a text, to which some tokenizers add a space.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

MOST = 1_000_000  # pairs of tokens that are compared; a second of work


class SplitPoints:
    """The tokens of one tokenizer in front of which a text may be cut, of those that its chat template writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        added = list(backend.get_added_tokens_decoder().values())
        written = str(tokenizer.chat_template)
        known = set(map(str, tokenizer.all_special_tokens))  # a template may write these by name
        texts = [token.content for token in added]
        wanted = [
            token.content
            for token in added
            if (token.content in known or token.content in written) and _stands_alone(token)
        ]
        if len(wanted) * len(texts) > MOST:
            wanted = []  # then every text is read as a whole, which gives the same
        endings = {text[-n:] for text in texts for n in range(1, len(text))} if wanted else set()
        self.tokens = [token for token in wanted if not _is_reached(token, texts, endings)]
        if getattr(tokenizer, "split_special_tokens", False) or getattr(backend, "encode_special_tokens", False):
            self.tokens = []  # they are text like any other

    def last(self, text: str, boundary: int) -> int:
        """The start of the last token that lies before the boundary: where to cut. 0 where there is none."""
        return max((0, *(text.rfind(token, 0, boundary) for token in self.tokens)))


def _stands_alone(token: Any) -> bool:
    """Whether a token is found by its own characters alone, and tells nothing else of what stands before it."""
    text = token.content
    plain = not (token.normalized or token.lstrip or token.single_word)
    # A word beside another added token could keep that one from being found, as some ask for whole words.
    return plain and bool(text) and text == text.strip() and not (text[0].isalnum() or text[0] == "_")


def _is_reached(token: str, texts: list[str], endings: set[str]) -> bool:
    """Whether another token, or this one, could be found in a place that overlaps this one's beginning: one that has
    it within, or one of whose endings it begins with."""
    within = any(token in other for other in texts if other != token)
    return within or any(token[:n] in endings for n in range(1, len(token)))
