"""Facts of a tokenizer, and of what it and its chat template made of the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig
from tuningfork.data.summary.records import SpecialToken, TokenizerFacts
from tuningfork.data.tokens.template_date import prints_the_date
from tuningfork.records import Source, TokenExample


def tokenizer_facts(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[TokenExample],
    data: DataConfig,
    model_rows: int,
    model_positions: int | None,
) -> TokenizerFacts:
    """Collect them. `model_rows` and `model_positions` are the model's vocab_size and max_position_embeddings."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = [_first_two(example, place) for example in examples for place in range(len(example.answers))]
    end = [answer.ids[-1] for example in examples for answer in example.answers]
    last_piece: dict[Source | str, int] = {}
    owner: Callable[[Source], Source | str] = _file if data.over_length == "stream" else _row
    for source in (example.source for example in examples):
        last_piece[owner(source)] = max(source.piece, last_piece.get(owner(source), 0))
    return TokenizerFacts(
        name=str(tokenizer.name_or_path),
        kind=type(tokenizer).__name__,
        tokens=len(tokenizer),
        highest_id=max(tokenizer.get_vocab().values()),
        model_rows=model_rows,
        model_positions=model_positions,
        bos=_special(tokenizer.bos_token, bos),
        eos=_special(tokenizer.eos_token, eos),
        pad=_special(tokenizer.pad_token, tokenizer.pad_token_id),
        template=data.template,
        date=data.date if data.template == "chat" and prints_the_date(tokenizer) else None,
        sequences=len(begin),
        begin_with_bos=sum(ids[:1] == [bos] for ids in begin),
        begin_with_two_bos=sum(ids == [bos, bos] for ids in begin),
        end_with_eos=sum(int(last) == eos for last in end),
        cut_before_eos=sum(
            0 < e.source.piece < last_piece[owner(e.source)] and int(e.answers[0].ids[-1]) != eos for e in examples
        ),
    )


def _row(source: Source) -> Source:
    return source.whole


def _file(source: Source) -> str:
    """What is in pieces where rows are joined."""
    return source.file


def _first_two(example: TokenExample, place: int) -> list[int]:
    return [*example.prompt_ids[:2].tolist(), *example.answers[place].ids[:2].tolist()][:2]


def _special(text: str | None, number: int | None) -> SpecialToken | None:
    return None if text is None or number is None else SpecialToken(str(text), number)
