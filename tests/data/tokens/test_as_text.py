"""Control tokens in the words as plain characters: the template's stay what they are, and every text is read whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.data.joint import byte_spans, printed
from tests.data.tiny_tokenizers import CHATML, SPECIAL, byte_bpe, sentence_piece
from tests.data.tokens.test_tokenize_properties import FAMILIES, conversations, harmless, tokenizers
from tests.real_tokenizers import Unavailable, real_tokenizer
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.as_text import AsText
from tuningfork.data.tokens.control_tokens import ControlTokens
from tuningfork.data.tokens.template import RenderedExample, render
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.records import Example, Message, Source, TokenExample, Turns

# One name for each vocabulary.
VOCABULARIES = ("smollm2", "qwen3", "llama3", "mistral", "phi3", "gemma3", "deepseek_v3", "gpt_oss")
END, START = "<|im_end|>", "<|im_start|>"


def of(prompt: Turns, answers: list[Turns]) -> Example:
    return Example(Source("f", 1), prompt, tuple(answers))


def chat(question: str, *answers: str) -> Example:
    return of((Message("user", question),), [(Message("assistant", answer),) for answer in answers])


def spelled(tokenizer: PreTrainedTokenizerBase, example: Example) -> RenderedExample:
    as_text = AsText(tokenizer, ControlTokens(tokenizer, chat=True))
    return as_text(example, lambda one: render(one, tokenizer))


def encoded(
    tokenizer: PreTrainedTokenizerBase, rendered: RenderedExample, encoder: Encoder | None = None
) -> TokenExample:
    (example,) = (encoder or Encoder(tokenizer, "none"))([rendered])
    return example


def sequences(example: TokenExample) -> list[list[int]]:
    return [[*example.prompt_ids.tolist(), *answer.ids.tolist()] for answer in example.answers]


def written(
    tokenizer: PreTrainedTokenizerBase, example: Example, control: ControlTokens | None = None
) -> list[list[int]]:
    """The control tokens that the template writes around harmless words, of each answer up to its end."""
    control = control or ControlTokens(tokenizer, chat=True)

    def blank(turns: Turns) -> Turns:
        return tuple(Message(turn.role, "word" if turn.content.strip() else turn.content) for turn in turns)

    texts = render(of(blank(example.prompt), list(map(blank, example.answers))), tokenizer).texts
    return [[tokenizer.convert_tokens_to_ids(token) for token in control.find(text)] for text in texts]


def controls(tokenizer: PreTrainedTokenizerBase, ids: list[int], control: ControlTokens | None = None) -> list[int]:
    known = set(tokenizer.convert_tokens_to_ids((control or ControlTokens(tokenizer, chat=True)).texts))
    return [i for i in ids if i in known]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(tokenizer=tokenizers(), conversation=conversations())
def test_control_tokens_stand_only_where_the_template_writes_them(
    name: str, tokenizer: PreTrainedTokenizerFast, conversation: tuple[Turns, list[Turns]]
) -> None:
    """And the tokens spell the whole text, as the template prints it."""
    tokenizer.chat_template = FAMILIES[name].template
    example = of(*conversation)
    try:
        plain = render(example, tokenizer)
        rendered = spelled(tokenizer, example)
        expected = written(tokenizer, example)
    except Unusable:
        return
    assert rendered.texts == plain.texts
    found = encoded(tokenizer, rendered)
    for ids, text, wanted in zip(sequences(found), rendered.texts, expected, strict=True):
        byte_spans(tokenizer, text, ids)
        assert controls(tokenizer, ids) == wanted


@settings(max_examples=150)
@given(
    tokenizers(),
    st.lists(st.one_of(harmless, st.sampled_from(SPECIAL)), min_size=1, max_size=6).map("".join),
    st.lists(st.one_of(harmless, st.sampled_from(SPECIAL)), min_size=1, max_size=6).map("".join),
)
def test_words_are_read_as_if_there_were_no_such_tokens(
    tokenizer: PreTrainedTokenizerFast, question: str, answer: str
) -> None:
    """By a tokenizer that has none, text between two control tokens by itself."""
    if tokenizer.backend_tokenizer.model.byte_fallback or not (question.strip() and answer.strip()):
        return  # SentencePiece reads the beginning of a text otherwise than what follows a control token
    tokenizer.chat_template = CHATML
    bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain = PreTrainedTokenizerFast(tokenizer_object=_without_added(bare))
    pieces = [
        START,
        "system\nBe kind.",
        END,
        "\n",
        START,
        f"user\n{question}",
        END,
        "\n",
        START,
        f"assistant\n{answer}",
    ]
    expected: list[int] = []
    for piece in (*pieces, END):
        special = piece in (START, END)
        expected += [SPECIAL.index(piece)] if special else plain(piece, add_special_tokens=False).input_ids
    assert sequences(encoded(tokenizer, spelled(tokenizer, chat(question, answer)))) == [expected]


def _without_added(backend: Tokenizer) -> Tokenizer:
    """The same merges without a single added token, and without a piece of the vocabulary that spells one."""
    import json

    facts = json.loads(backend.to_str())
    facts |= {"added_tokens": [], "post_processor": None}
    vocab = facts["model"]["vocab"]
    facts["model"]["vocab"] = {f"unused{i}" if piece in SPECIAL else piece: i for piece, i in vocab.items()}
    return Tokenizer.from_str(json.dumps(facts))


@pytest.mark.parametrize("name", ["chatml", "inst", "closing"])
@settings(max_examples=60)
@given(tokenizer=tokenizers(), question=harmless, answers=st.lists(harmless, min_size=1, max_size=3))
def test_words_without_control_tokens_have_the_tokens_of_ever(
    name: str, tokenizer: PreTrainedTokenizerFast, question: str, answers: list[str]
) -> None:
    tokenizer.chat_template = FAMILIES[name].template
    same_as_ever(tokenizer, chat(question, *answers))


def same_as_ever(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    one, other = encoded(tokenizer, render(example, tokenizer)), encoded(tokenizer, spelled(tokenizer, example))
    assert sequences(one) == sequences(other) and one.prompt_ids.tolist() == other.prompt_ids.tolist()
    for a, b in zip(one.answers, other.answers, strict=True):
        assert a.mask.tolist() == b.mask.tolist()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_published_tokenizers(name: str) -> None:
    """Every kind of control token of each, beside spaces, words, line breaks and one another."""
    try:
        tokenizer = real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    control = ControlTokens(tokenizer, chat=True)
    as_text, encoder = AsText(tokenizer, control), Encoder(tokenizer, "none")
    few = [*control.opens, *control.ends, *control.texts[:: max(1, len(control.texts) // 6)]]
    harmless = chat("Why  is\nthe sky 12345 blue? é你😀", "  Air\n\nscatters.", "Because <b>.")
    rendered = as_text(harmless, lambda one: render(one, tokenizer))
    plain = render(harmless, tokenizer)
    assert sequences(encoded(tokenizer, rendered, encoder)) == sequences(encoded(tokenizer, plain, encoder))
    for one, other in zip(few, [*few[1:], few[0]], strict=True):
        example = chat(
            f"what {one}is{other}\n{one} ?", f"a{other}{one}b {one}{one} c", f"{other}\nassistant\nno {one} d"
        )
        rendered = as_text(example, lambda one: render(one, tokenizer))
        found = encoded(tokenizer, rendered, encoder)
        wanted = written(tokenizer, example, control)
        for ids, text, expected in zip(sequences(found), rendered.texts, wanted, strict=True):
            assert text.count(one) >= 3
            byte_spans(tokenizer, text, ids)
            assert controls(tokenizer, ids, control) == expected
        assert all(answer.mask.any() for answer in found.answers)


def test_by_hand() -> None:
    """Ids of a byte-level tokenizer: 2 and 3 are the markers, all else is bytes."""
    tokenizer = byte_bpe([("<", "|"), ("|", "Ċ"), ("n", "d")], chat_template=CHATML)
    example = encoded(tokenizer, spelled(tokenizer, chat(f"x{END}", f"y{START}z", "no")))
    pieces = tokenizer.convert_ids_to_tokens(example.prompt_ids.tolist())
    asked = "x,<|,i,m,_,e,nd,|,>"
    assert ",".join(pieces).endswith(f"u,s,e,r,Ċ,{asked},{END},Ċ,{START},a,s,s,i,s,t,a,n,t,Ċ")
    assert tokenizer.convert_ids_to_tokens(example.answers[0].ids.tolist()) == [
        *("y", "<|", "i", "m", "_", "s", "t", "a", "r", "t", "|", ">", "z", END)
    ]
    assert example.answers[0].mask.all()


def test_a_vocabulary_that_has_the_spelling_as_a_piece_does_not_find_it_there() -> None:
    """Tokenizers that look whole words up first, as Llama 3's, would have the control token for its text again."""
    tokenizer = byte_bpe(chat_template=CHATML, splits_words=False)
    tokenizer.backend_tokenizer.model.ignore_merges = True
    example = encoded(tokenizer, spelled(tokenizer, chat(f"q{END}", END, "no")))
    assert [list(part).count(3) for part in (example.prompt_ids, example.answers[0].ids)] == [2, 1]


def unusable(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    with pytest.raises(Unusable) as caught:
        spelled(tokenizer, example)
    assert caught.value.reason == "control token written as text"
    return caught.value.detail


def test_a_tokenizer_that_has_no_characters_for_it() -> None:
    """Letters that are unknown become the unknown token, or nothing at all."""
    for unknown in ("?", None):
        tokens = [*SPECIAL, "?", *"abcdefghijklmnopqrstuvwxyzBSk ._\nĊ"]
        model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=unknown)
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.Split("\0", "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.chat_template = CHATML
        assert unusable(tokenizer, chat(f"what is {END}", "a", "b")) == (
            f"and the tokenizer has no plain characters for {END}"
        )
    letters = sentence_piece(letters="ab")  # it has bytes for what it does not know
    letters.chat_template = CHATML
    assert controls(letters, sequences(encoded(letters, spelled(letters, chat(END, "a"))))[0]).count(3) == 3


def test_a_template_that_looks_into_the_words() -> None:
    template = CHATML.replace("message['content'] +", "message['content'].replace('<|im_end|>', '(end)') +")
    detail = unusable(byte_bpe(chat_template=template), chat(f"q{END}", "a", "b"))
    assert detail == "and the chat template prints other words in its place otherwise"


def test_words_with_the_characters_that_are_used_here() -> None:
    assert "U+F0000" in unusable(byte_bpe(chat_template=CHATML), chat(f"{END}\U000f0003", "a", "b"))


def test_a_tokenizer_whose_merges_make_its_control_token() -> None:
    tokens = [*SPECIAL, "<", "/", "s", ">", "</", "s>"]
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = CHATML
    assert "cannot do without it" in unusable(tokenizer, chat("</s>", "a", "b"))


def test_the_printing_is_the_templates() -> None:
    tokenizer = byte_bpe(chat_template=CHATML)
    example = chat(f"q{END}", "a")
    assert spelled(tokenizer, example).texts[0] + "\n" == printed(tokenizer, (*example.prompt, *example.answers[0]))
