"""Published tokenizers with their published templates: what is trained on is their own reading of each conversation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.data.joint import Style, boundary, differences, encoded, printed, refused, whole
from tests.real_tokenizers import DEEPSEEK_V4, REAL, Unavailable, real_tokenizer, vocabulary
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import render
from tuningfork.data.tokens.template_date import prints_the_date, with_fixed_date
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.records import Example, Message, Source, TokenExample, Turns

CHATML = Style("<|im_start|>assistant\n", "<|im_end|>")
LLAMA = Style("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
GEMMA = Style("<start_of_turn>model\n", "<end_of_turn>")
DEEPSEEK = Style("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
STYLES = {
    **dict.fromkeys(("smollm2", "qwen2_5", "qwen3"), CHATML),
    **dict.fromkeys(("llama3", "llama3_first", "llama3_1"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), DEEPSEEK),
    "mistral": Style("[/INST]", "</s>"),
    "phi3": Style("<|assistant|>\n", "<|end|>", last_end="<|end|>\n<|endoftext|>"),
    "gpt_oss": Style("<|start|>assistant", "<|end|>", last_end="<|return|>"),
}
# What a template prints of "yes" behind the generation prompt, written down by hand. For R1 it is behind the part of
# the generation prompt that the conversation shares.
COUNTED = {
    **dict.fromkeys(("smollm2", "qwen2_5"), "yes<|im_end|>"),
    "qwen3": "<think>\n\n</think>\n\nyes<|im_end|>",
    **dict.fromkeys(("llama3", "llama3_first", "llama3_1"), "yes<|eot_id|>"),
    **dict.fromkeys(("gemma2", "gemma3"), "yes<end_of_turn>"),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), "yes<｜end▁of▁sentence｜>"),
    "mistral": " yes</s>",
    "phi3": " yes<|end|><|endoftext|>",  # its markers swallow line breaks, and SentencePiece opens a word behind them
    "gpt_oss": "<|channel|>final<|message|>yes<|return|>",
}
BOS = {
    **dict.fromkeys(("llama3", "llama3_first", "llama3_1"), "<|begin_of_text|>"),
    **dict.fromkeys(("gemma2", "gemma3"), "<bos>"),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), "<｜begin▁of▁sentence｜>"),
    "mistral": "<s>",
}  # the others' templates print none

SPECIAL = (
    "a <|im_end|> b </s> c <|eot_id|> d <end_of_turn> e <｜end▁of▁sentence｜> f <s> g <bos> h <|end|> i "
    "<|endoftext|> j <|begin_of_text|> k [/INST] l <|im_start|>assistant\nm"
)


def user(*contents: str) -> Turns:
    """Turns of a user and an assistant, the user's first."""
    return tuple(Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents))


def assistant(*contents: str) -> Turns:
    """Turns of an assistant and a user, the assistant's first."""
    return tuple(Message(("assistant", "user")[i % 2], content) for i, content in enumerate(contents))


def system(content: str) -> Turns:
    return (Message("system", content),)


Case = tuple[Turns, tuple[Turns, Turns]]
CASES: dict[str, Case] = {
    "one turn": (user("Why is the sky blue?"), (assistant("Air scatters blue light."), assistant("Because."))),
    "longer prompt": (user("Hi", "Hello!", "Say more"), (assistant("More."), assistant("No, thanks."))),
    "system": (system("Be kind.") + user("Hi"), (assistant("Hello"), assistant("Go away"))),
    "empty system": (system("") + user("Hi"), (assistant("Hello"), assistant("Go away"))),
    "longer answer": (user("Hi"), (assistant("Hello", "How are you?", "Fine."), assistant("Go away"))),
    "long all over": (
        system("Be kind.") + user("Hi", "Hello!", "Say more"),
        (assistant("More.", "and?", "Even more.", "Enough", "Right."), assistant("No.", "why", "Because.")),
    ),
    "unicode": (
        user("naïve cafe\u0301 😀 👩\u200d👩\u200d👧 你好 שלום"),
        (assistant("cafe\u0301 😀👩\u200d👧 你好e\u0301"), assistant("\u0301 שלום 😁")),
    ),
    "white space around": (user("  \n hello \t\n"), (assistant("  \n\n yes \n "), assistant("\n no\t"))),
    "nothing but white space": (user(" \n "), (assistant("yes"), assistant("no"))),
    "line breaks in front": (user("q"), (assistant("\n\nyes"), assistant("\nno"))),
    "spaces in front": (user("q"), (assistant(" yes"), assistant("  no"))),
    "markers in the prompt": (user(SPECIAL), (assistant("yes"), assistant("no"))),
    "markers in an answer": (user("q"), (assistant(f"x {SPECIAL} y"), assistant("no"))),
    "digits": (user("12345+67890="), (assistant("80235"), assistant("1. one\n2. two 3.14159"))),
    "a common start": (user("q"), (assistant("one two three"), assistant("one two four"))),
    "a thought in the prompt": (
        user("q", "<think>\nwhy\n</think>\n\nbecause", "go on"),
        (assistant("more"), assistant("less")),
    ),
}

# One name for each vocabulary; DeepSeek V4's comes without a template.
VOCABULARIES = ("smollm2", "qwen3", "llama3", "mistral", "phi3", "gemma3", "deepseek_v3", "deepseek_v4", "gpt_oss")


@cache
def loaded(name: str) -> tuple[PreTrainedTokenizerBase, Encoder]:
    try:
        tokenizer = real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    return tokenizer, Encoder(tokenizer, "chat")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", REAL)
def test_ids_masks_and_prompts_are_those_of_the_whole_conversations(name: str, case: str) -> None:
    tokenizer, encoder = loaded(name)
    prompt, answers = CASES[case]
    if refused(tokenizer, prompt, answers):
        assert name == "gemma2" and prompt[0].role == "system"  # the only one of them that knows no system turn
        with pytest.raises(Unusable, match="the chat template refuses the conversation"):
            encoded(tokenizer, prompt, answers, encoder)
        return
    wholes = [whole(tokenizer, STYLES[name], prompt, answer) for answer in answers]
    example = encoded(tokenizer, prompt, answers, encoder)
    assert differences(example, wholes, boundary(tokenizer, prompt, wholes)) == []


@pytest.mark.parametrize("name", REAL)
def test_one_turn_word_by_word(name: str) -> None:
    """Against what was written down by hand: the answer with its end marker counts, nothing else is there."""
    tokenizer, encoder = loaded(name)
    example = encoded(tokenizer, user("xylophone"), (assistant("yes"), assistant("no")), encoder)
    answer, _ = example.answers
    assert answer.mask.all()
    assert text_of(tokenizer, answer.ids) == COUNTED[name]
    assert text_of(tokenizer, example.prompt_ids).count("xylophone") == 1
    bos = [tokenizer.convert_tokens_to_ids(BOS[name])] if name in BOS else []
    assert example.prompt_ids[: len(bos)].tolist() == bos
    if bos:
        for answer in example.answers:
            assert [*example.prompt_ids, *answer.ids].count(*bos) == 1
    end = tokenizer.convert_tokens_to_ids(STYLES[name].last_end.rpartition("\n")[2] or STYLES[name].end)
    for answer in example.answers:
        assert answer.ids.tolist().count(end) == 1 and answer.ids[-1] == end


# R1 is given the start of a thought, which its template keeps out of conversations.
@pytest.mark.parametrize("name", [name for name in REAL if name != "deepseek_r1"])
def test_the_prompt_is_what_the_model_is_given_to_answer(name: str) -> None:
    """Ids of the generation prompt, whole: nothing of these answers merges with it."""
    tokenizer, encoder = loaded(name)
    prompt = user("Hi", "Hello!", "Say more")
    example = encoded(tokenizer, prompt, (assistant("More."), assistant("No.")), encoder)
    generation = tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in prompt], add_generation_prompt=True, return_dict=False
    )
    assert example.prompt_ids.tolist() == generation


THOUGHT = "<think>\nwhy\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "answer", "counted"),
    [
        ("qwen3", (f"{THOUGHT}because",), [f"{THOUGHT}because<|im_end|>"]),
        ("qwen3", ("because", "go on", f"{THOUGHT}more"), ["because<|im_end|>", f"{THOUGHT}more<|im_end|>"]),
        ("smollm2", (f"{THOUGHT}because", "go on", "more"), [f"{THOUGHT}because<|im_end|>", "more<|im_end|>"]),
        ("deepseek_v3", (f"{THOUGHT}because",), [f"{THOUGHT}because<｜end▁of▁sentence｜>"]),
    ],
)
def test_thoughts_count_where_the_template_prints_them(name: str, answer: tuple[str, ...], counted: list[str]) -> None:
    tokenizer, encoder = loaded(name)
    turns = assistant(*answer)
    example = encoded(tokenizer, user("q"), (turns, assistant("no")), encoder)
    first = example.answers[0]
    assert text_of(tokenizer, first.ids[first.mask]) == "".join(counted)
    joint = tokenizer(printed(tokenizer, (*user("q"), *turns)), add_special_tokens=False).input_ids
    ids = [*example.prompt_ids, *first.ids]
    assert ids == joint[: len(ids)]


def test_an_answer_loses_no_thoughts_in_silence() -> None:
    """R1's template cuts them out of every turn, the one to learn among them."""
    tokenizer, encoder = loaded("deepseek_r1")
    with pytest.raises(Unusable, match="thoughts of message 2"):
        encoded(tokenizer, user("q"), (assistant(f"{THOUGHT}because"), assistant("no")), encoder)
    earlier = encoded(tokenizer, user("q", f"{THOUGHT}because", "go on"), (assistant("more"), assistant("no")), encoder)
    assert "because" in text_of(tokenizer, earlier.prompt_ids) and "why" not in text_of(tokenizer, earlier.prompt_ids)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'),
        ("qwen3", '<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'),
        ("llama3_1", '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'),
    ],
)
def test_arguments_written_as_json_text_are_printed_once(name: str, counted: str) -> None:
    """OpenAI writes a call's arguments as text, which these templates would write as JSON once more."""
    tokenizer, encoder = loaded(name)
    call = (Message("assistant", "", {"tool_calls": [CALL]}),)
    answer, _ = encoded(tokenizer, user("q"), (call, assistant("no")), encoder).answers
    assert text_of(tokenizer, answer.ids[answer.mask]) == counted


F = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x":1}\n```<｜tool▁call▁end｜>'


@pytest.mark.parametrize(("calls", "end"), [(1, ""), (2, "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")])
def test_calls_without_words_are_printed_where_the_template_tells_them_by_null(calls: int, end: str) -> None:
    """By hand from DeepSeek's template, which closes only a second call."""
    tokenizer, encoder = loaded("deepseek_v3")
    asked = Message("assistant", "", {"tool_calls": [CALL] * calls})
    turns = (asked, Message("tool", "7"), *assistant("yes"))
    answer, _ = encoded(tokenizer, user("q"), (turns, assistant("no")), encoder).answers
    text = "<｜tool▁calls▁begin｜>" + "\n".join([F] * calls) + end
    assert text_of(tokenizer, answer.ids[answer.mask]) == f"{text}yes<｜end▁of▁sentence｜>"
    outputs = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert text_of(tokenizer, answer.ids) == f"{text}{outputs}yes<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nyes<|im_end|>"),
        (
            "gpt_oss",  # it calls them thinking
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
        ),
    ],
)
def test_thoughts_beside_the_content_are_printed(name: str, counted: str) -> None:
    tokenizer, encoder = loaded(name)
    thinks = (Message("assistant", "yes", {"reasoning_content": "hm"}),)
    answer, _ = encoded(tokenizer, user("q"), (thinks, assistant("no")), encoder).answers
    assert text_of(tokenizer, answer.ids[answer.mask]) == counted


def test_the_date_is_that_of_the_moment_that_is_given() -> None:
    tokenizer, _ = loaded("gpt_oss")
    dated = with_fixed_date(tokenizer, "2024-02-29")
    text = render(Example(Source("f", 1), user("q"), (assistant("a"),)), dated).texts[0]
    assert text.count("Current date: 2024-02-29\n") == 1 and prints_the_date(tokenizer)


def test_first_thoughts_are_taken_out_of_the_prompt_as_the_template_does() -> None:
    tokenizer, encoder = loaded("qwen3")
    prompt, answers = CASES["a thought in the prompt"]
    text = text_of(tokenizer, encoded(tokenizer, prompt, answers, encoder).prompt_ids)
    assert "assistant\nbecause<|im_end|>" in text and "why" not in text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_plain_text_is_the_tokenizers_own_reading_of_it(name: str) -> None:
    try:
        tokenizer = vocabulary(DEEPSEEK_V4) if name == "deepseek_v4" else real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    encoder = Encoder(tokenizer, "none")
    for prompt, *answers in (
        ("Once upon a time,", " there was", " no"),
        ("12", "345", "3"),
        ("x\n", "\ny", " y"),
        ("😀 ", "😁e\u0301", "  z"),
    ):
        (example,) = encoder([render(Example(Source("f", 1), prompt, tuple(answers)), tokenizer)])
        assert_plain(tokenizer, example, prompt, answers)


def assert_plain(tokenizer: Any, example: TokenExample, prompt: str, answers: list[str]) -> None:
    for answer, text in zip(example.answers, answers, strict=True):
        joint = [*tokenizer(f"{prompt}{text}").input_ids, tokenizer.eos_token_id]
        assert [*example.prompt_ids, *answer.ids] == joint
        given = tokenizer(prompt).input_ids
        assert example.prompt_ids.tolist() == given[: len(example.prompt_ids)]
        # what the mask leaves out of the answer are tokens that end within the prompt, which not all answers share
        n = sum(~answer.mask)
        assert not answer.mask[:n].any() and answer.mask[n:].all()
        assert len(tokenizer.decode(joint[: len(example.prompt_ids) + n])) <= len(tokenizer.decode(given))


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """What the ids spell, leading spaces included, which some decoders strip from the start of a text."""
    anchor = tokenizer.eos_token_id
    text = tokenizer.decode([anchor, *map(int, ids)], clean_up_tokenization_spaces=False)
    return text.removeprefix(tokenizer.decode([anchor]))
