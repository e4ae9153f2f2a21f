"""A tokenizer of bytes: a token for each byte of a text's UTF-8, with the byte as its id, and three marks."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

NAME = "bytes"
BOS, EOS, PAD = 256, 257, 258
SYMBOLS = 320
"""Rows of an embedding for these tokens: a multiple of 64, as matrix units like it."""

_MARKS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers' own class: a byte-level BPE without merges.

    It puts BOS in front of a text, so that all of its bytes have a predictor. What a text encodes to decodes to that
    text, whatever characters it has; a mark that it spells, such as ``<|eos|>``, is read as that mark, as by any
    tokenizer, so `data/tokens/as_text.py` has documents read by a copy without marks.
    """
    letters = _letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)} | _MARKS
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    bos, eos, pad = _MARKS
    backend.add_special_tokens([bos, eos, pad])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )


def _letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's): its own where that is printed and
    no space, else one of the next from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
