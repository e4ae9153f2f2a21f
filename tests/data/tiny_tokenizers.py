"""Tokenizers small enough to know every id of, and chat templates of the common kinds."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Like SmolLM2 and Qwen: a default system message, and a newline behind every end marker.
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Llama 2: one BOS from the template, no generation prompt, EOS behind each answer, strict roles.
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Like the thinking models: only the last assistant turn keeps its empty thought.
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_bpe(
    merges: Sequence[tuple[str, str]] = (),
    *,
    chat_template: str | None = None,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    pad: str | None = None,
    adds_bos: bool = False,
    trim_offsets: bool = True,
    splits_words: bool = True,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE: ids 0..3 are the special tokens, 4..259 the bytes, then the merges in order.

    `Ġ` stands for a space in merges. trim_offsets is GPT-2's default: a token's offsets leave its white space out.
    Without splits_words anything may merge with what stands beside it.
    """
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)
    backend.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = chat_template
    return tokenizer


def sentence_piece(
    merges: Sequence[tuple[str, str]] = (), *, letters: str, prepend: str = "first"
) -> PreTrainedTokenizerFast:
    """A BPE as SentencePiece makes them: ▁ for a space, letters, and <0x41> for bytes of any other character.

    ids 0..3 are the special tokens, 4..259 the bytes, then ▁, the letters and the merges in order. `prepend`: whether a
    ▁ of its own goes in front of a text: "first" or "never".
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *pieces, "▁", *letters, *("".join(pair) for pair in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges), byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def word_level(words: Sequence[str], chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One id per word, in the order given; white space separates and is covered by no token. No special tokens."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = chat_template
    return tokenizer
