"""Settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuningfork.data.examples.formats import FORMATS
from tuningfork.data.packing.tree import Share

if TYPE_CHECKING:
    FormatName = str
else:  # so that a format has one declaration, its own
    FormatName = Literal["auto", *FORMATS]

Named = Annotated[str, Field(min_length=1)]
"""What names something: an empty path would be the current folder."""

CHAT, NO_TEMPLATE = "chat", "none"
TEMPLATE = r"^(chat|none|.+\.(jinja|jinja2|j2))$"
TEMPLATE_FORMS = "chat (the tokenizer's own template), none, or the path of a file that ends in .jinja"
"""What data.template may be, as a pattern and in words; data/template_file.py reads a file."""


@dataclass
class DataConfig:
    """Which rows are read and how they become tokens."""

    train: str | list[Named] = ""
    """Examples to train on, from one source or a list of them: a file (JSONL, JSON, Parquet, CSV or TSV, plain or
    gzipped), a pattern such as shards/*.parquet, a folder, or hub:owner/name:split, also with @revision behind the name
    and without hub: where there is no such path. Of a folder or a hub name with splits, the one for training.
    config.yaml has the commit of a hub name."""
    shares: list[Annotated[float, Field(gt=0)]] | None = None
    """Part of the examples that each source of a list makes up, in any unit: [3, 1]. As many are taken as can be, and
    at least one of each."""
    counts: list[Annotated[int, Field(ge=1)]] | None = None
    """Examples to take from each source of a list."""
    mix_seed: Annotated[int, Field(ge=0)] = 0
    """Decides which examples of a source a mix takes."""
    eval: Named | list[Named] | None = None
    """Held-out examples from any of the same sources; scored before and after training. Of a folder or a hub name with
    splits, the validation split, else the test split."""
    format: FormatName = "auto"
    """What the fields of a row are. auto: told by their names, the same for a whole file."""
    columns: dict[str, str | None] | None = None
    """Fields of the files under names that a format reads: {question: prompt, better: chosen, worse: rejected}. One
    that is null is left out: {tools: null}."""
    roles: dict[str, str] | None = None
    """What the files call roles of a conversation, beside the names that are known: {customer: user, agent: assistant}.
    Ours are system, developer, user, assistant and tool; tool_call is an assistant's turn whose content is a call."""
    answers: Literal["all", "best"] = "all"
    """Which answers of a row are used. best: of several the first, the chosen one of a pair, without the row's margin:
    for objective.name: sft, which imitates single answers. The others must still be answers that can be read."""
    train_on: Literal["last", "all_assistant"] = "all_assistant"
    """Which assistant turns of an answer count, where it has several: all of them, or the last."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens of the longest sequence (prompt + one answer)."""
    over_length: Literal["drop", "truncate_answers", "truncate_prompt_left", "pieces", "stream"] = "drop"
    """What becomes of a longer example: listed and left out; every answer cut at the same length; its prompt cut at the
    front, by no more than is needed and never its first BOS; or, of documents, pieces of max_length one behind the
    other, each an example, of which nothing is lost: a piece begins with the last token of the one before, which
    predicts its first. stream: as others do it, documents of a file, short ones too, are joined behind their end tokens
    and the whole is cut so; within a piece documents see one another, which leaks from one into the next by design."""
    cache: Named | None = "./token-cache"
    """Folder that keeps tokens between runs, by content, so never stale; null keeps them in memory only."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Most processes that turn rows into tokens; a short table needs fewer. null: one for each core."""
    date: Named | None = None
    """The day that a chat template prints, where it prints one: 2026-01-31. null: when the run in output.dir began, or
    today."""
    control_tokens: Literal["keep", "as_text", "drop"] | None = None
    """What becomes of control tokens that rows spell in their own words, such as an end of turn in what a user says.
    keep: they are control tokens; as_text: plain characters; drop: the row is dropped. null: kept in conversations,
    plain characters in documents, and a finding in both, for nobody asked for them; in prompts and answers that are
    plain text they are what was asked for."""
    template: Annotated[str, Field(pattern=TEMPLATE, description=TEMPLATE_FORMS)] = CHAT
    """chat: the tokenizer's chat template; plain strings become a user and an assistant turn. none: text as it is. Or
    the path of a .jinja file: its template in place of the tokenizer's; it is no part of the exported model."""

    def day(self, began: str | None = None) -> str:
        """The day that a chat template prints: its own, or that on which a run `began`, or today."""
        return self.date or began or date.today().isoformat()

    def with_day(self, began: str | None = None) -> DataConfig:
        """These settings with the day that `day` gives."""
        return replace(self, date=self.day(began))


@dataclass
class PackConfig:
    """How examples share a pack."""

    tokens: Annotated[int, Field(ge=64)] = 8192
    """Tokens of a full pack; those that it has in memory are rounded up, to a multiple of 128 on a GPU and of 64 on a
    CPU. Larger packs run faster and need more memory; the numbers do not change."""
    share: Share = "tree"
    """What is stored and computed once. tree: whatever the examples of a pack begin with in common: system prompts,
    tools, earlier turns, answers. prompt: each prompt, for all answers of its example. none: nothing, each answer has
    its prompt again. Log-probs are the same to the bit."""
