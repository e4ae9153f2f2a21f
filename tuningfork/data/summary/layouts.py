"""What an epoch costs in token slots and attention, layout by layout, as records: a part of the tree in records.py."""

from __future__ import annotations

from dataclasses import dataclass

from tuningfork.records import Source

PLAIN_BATCH = 8
"""Examples of a plain trainer's batch; of pairs, 16 sequences. All are padded to the longest of them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The token slots of one epoch in one layout: tokens of six kinds, and padding.

    `name` is one of

        padded    batches of PLAIN_BATCH examples, every sequence padded to the longest of its batch: the mean over all
                  orders of the file
        packed    each sequence by itself in packs of pack.tokens
        shared    the prompt once for all of its answers
        trees     whatever the examples of a pack begin with in common once, step by step in some order
        together  the same, but all examples that begin alike side by side, without regard to steps: no order of the
                  examples can share much more
    """

    name: str
    order: str  # of trees, in words; empty for the recipe's own
    slots: int
    common_prompt: int  # laid once for several examples, of all of which it is prompt: instructions, tools, history
    common_answer: int  # laid once for several examples, of one or more of which it is an answer
    prompt: int  # of one example, as all that follows
    prompt_again: int  # prompts stored once more, for another answer than the first
    chosen: int  # first answers; those of examples with a single one, too
    rejected: int  # all others
    padding: int
    pad_share: float
    tokens_saved: float  # share of all tokens, the prompt once per answer
    attention_pairs: int  # (query, key) pairs of causal attention, without padding
    attention_saved: float  # share of the pairs that each sequence by itself has

    @property
    def tokens(self) -> int:
        """The slots that are no padding."""
        return self.slots - self.padding

    @property
    def parts(self) -> dict[str, int]:
        """Where the slots go: field -> how many of them."""
        return {
            "common_prompt": self.common_prompt,
            "common_answer": self.common_answer,
            "prompt": self.prompt,
            "prompt_again": self.prompt_again,
            "chosen": self.chosen,
            "rejected": self.rejected,
            "padding": self.padding,
        }


@dataclass(frozen=True, slots=True)
class Parted:
    """Rows whose prompt goes on from another row's answer, but where its tokens part from it at the answer's start,
    because the chat template prints an answer otherwise once it is history."""

    count: int
    rows: list[Source]  # the first of them
    left_out: str  # what history most often leaves out of an answer, as text; empty where it adds something instead
    added: str
    tokens: int  # laid in an epoch for that reason alone, in the recipe's order
    tokens_together: int  # and with all examples that begin alike side by side


@dataclass(frozen=True, slots=True)
class Cost:
    """What an epoch costs in slots and in attention, and what laying tokens once saves.

    Packs are really made, of the first `examples_packed` examples: all of them, or the first steps of very many, from
    which an epoch's numbers are scaled up.
    """

    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int  # the prompt once per example
    counted_tokens: int  # answer tokens whose log-prob counts in the loss
    examples_packed: int
    layouts: list[Layout]
    parted: Parted | None  # None where there are none, and where pack.share is not tree, so that nothing is lost by it

    def layout(self, name: str, order: str = "") -> Layout:
        """The layout of a name; of trees the one in the recipe's order, unless another is named."""
        return next(layout for layout in self.layouts if (layout.name, layout.order) == (name, order))
