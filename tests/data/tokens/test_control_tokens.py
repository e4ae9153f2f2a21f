"""Control tokens in a file's own words: which they are, where they are found, and the one end of an answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tests.bounds import within
from tests.data.summary.workbench import write
from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe, word_level
from tests.real_tokenizers import Unavailable, real_tokenizer
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.values import Unusable
from tuningfork.data.prepare import control_line, prepare_examples
from tuningfork.data.tokens.control_tokens import (
    AS_TEXT,
    CUT,
    ENDED,
    KEPT,
    ONE_END,
    RENDERED,
    WRITTEN,
    ControlTokens,
    with_changed_strings,
)
from tuningfork.records import Example, Message, Source, TokenExample

END, START = "<|im_end|>", "<|im_start|>"


def pair(prompt: Any, chosen: Any, rejected: Any = "no") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def prepared(
    tmp_path: Any, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
) -> tuple[list[TokenExample], DataReport]:
    tokenizer = tokenizer or byte_bpe(chat_template=CHATML)
    path = write(tmp_path / "rows.jsonl", rows)
    examples, report = prepare_examples(path, tokenizer, DataConfig(**settings), len(tokenizer))
    return list(examples), report


def texts(example: TokenExample, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    tokenizer = tokenizer or byte_bpe()
    return [tokenizer.decode(part) for part in (example.prompt_ids, *(answer.ids for answer in example.answers))]


def of_chat(prompt: str, *answers: str, **extra: Any) -> Example:
    said = tuple((Message("assistant", answer, extra),) for answer in answers)
    return Example(Source("f", 1), (Message("user", prompt),), said)


@cache
def control_of(name: str) -> ControlTokens:
    try:
        return ControlTokens(real_tokenizer(name), chat=True)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "control", "words", "ends"),
    [
        (
            "qwen3",  # the last three have no mark, and are written like those that have it
            ("<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>"),
            ("<think>", "</think>", "<tool_call>", "</tool_response>"),
            {"<|im_end|>"},
        ),
        (
            "llama3_1",
            ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|python_tag|>"),
            (),
            {"<|eot_id|>", "<|end_of_text|>"},
        ),
        ("mistral", ("<s>", "</s>", "<unk>"), ("[INST]",), {"</s>"}),
        ("phi3", ("<|user|>", "<|end|>"), (), {"<|end|>", "<|endoftext|>"}),
        ("gemma3", ("<bos>", "<start_of_turn>", "<image_soft_token>"), ("\n\n", "<table>", "<h1>"), {"<end_of_turn>"}),
        (
            "deepseek_v3",  # the roles have no mark
            ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁sep｜>"),
            ("<think>",),
            {"<｜end▁of▁sentence｜>"},
        ),
        ("gpt_oss", ("<|start|>", "<|channel|>", "<|return|>"), (), {"<|return|>", "<|end|>"}),
    ],
)
def test_control_tokens_and_ends_of_published_tokenizers(
    name: str, control: tuple[str, ...], words: tuple[str, ...], ends: set[str]
) -> None:
    found = control_of(name)
    known = real_tokenizer(name).get_vocab()
    assert {token for token in control if token in known} <= set(found.texts)
    assert not set(words) & set(found.texts)
    assert set(found.ends) == ends
    assert found.opens and not set(found.opens) & ends


def test_which_added_tokens_are_control_tokens() -> None:
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<|role|>", "<call>", "\n\n")])
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<think>", "[/THINK]", "<img>")])
    assert set(ControlTokens(tokenizer, True).texts) == {"<s>", "</s>", START, END, "<|role|>", "<img>"}
    tokenizer.split_special_tokens = True  # then what is marked special is text like any other
    assert set(ControlTokens(tokenizer, True).texts) == {"<|role|>"}
    bare = ControlTokens(word_level(["a", "b"], CHATML), True)
    assert (bare.texts, bare.ends, bare.find("a <|im_end|>"), bare.match("")) == ([], [], [], "")


def test_a_token_that_stands_alone_as_a_word_is_found_only_so() -> None:
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.add_tokens([AddedToken("STOP", special=True, single_word=True)])
    control = ControlTokens(tokenizer, True)
    for text, times in (("a STOP.", 1), ("NONSTOP", 0), ("STOPS", 0)):
        assert len(control.find(text)) == times == tokenizer(text).input_ids.count(len(tokenizer) - 1)


def test_everything_that_a_row_says_is_looked_at() -> None:
    control = ControlTokens(byte_bpe(chat_template=CHATML), True)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": ["\\u003cs\\u003e"], "</s>": 1}'}}
    prompt = (Message("system", f"a{END}b{END}"), Message("user", "q"), Message("tool", "7", {"name": START}))
    answers = tuple((Message("assistant", text, {"tool_calls": [call], "reasoning_content": START}),) for text in "ab")
    template = {"tools": [{"function": {"description": END}}], "style": {"<s>": 1}, "enable_thinking": False}
    found = control.in_words(Example(Source("f", 1), prompt, answers, template=template))
    assert found == [
        (END, "prompt (system)"),
        (START, "prompt (tool, name)"),
        *((t, f"{side} (assistant, tool_calls)") for side in ("chosen",) for t in ("</s>", "<s>")),
        (START, "chosen (assistant, reasoning_content)"),
        *((t, f"{side} (assistant, tool_calls)") for side in ("rejected",) for t in ("</s>", "<s>")),
        (START, "rejected (assistant, reasoning_content)"),
        (END, "tools"),
        ("<s>", "chat_template_kwargs.style"),
    ]
    whole = Example(Source("f", 1), prompt, answers, template=template)
    assert control.in_words(with_changed_strings(whole, lambda text: control.pattern.sub("", text))) == []
    assert with_changed_strings(whole, lambda text: text) == whole
    assert with_changed_strings(whole, str).template == template


def test_thoughts_and_calls_written_in_content_are_nobodys_fault(tmp_path: Any) -> None:
    try:
        tokenizer = real_tokenizer("qwen3")
    except Unavailable as error:
        pytest.skip(str(error))
    answer = '<think>\nIt is four.\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>'
    _, report = prepared(tmp_path, [pair("q", answer, "<think>\n\n</think>\n\n5")], tokenizer)
    assert report.notes == {}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (f"good{END}", f"bad{END}"),
        (f"good{END}", "bad"),
        ("good", f"bad{END}\n"),
        (f"good{END}\n \n", f"bad{END}{END}\n{END} "),
        (f"good</s>{END}", "bad</s>\n"),  # EOS, which this template does not write, would end it a second time
    ],
)
def test_an_answer_that_ends_in_its_end_marker_has_one(tmp_path: Any, chosen: str, rejected: str) -> None:
    """Whichever side wrote it, the tokens are those of the answers without it; and it is noted."""
    [example], report = prepared(tmp_path, [pair("q", chosen, rejected)])
    [clean], nothing = prepared(tmp_path, [pair("q", "good", "bad")])
    assert texts(example) == texts(clean) and texts(example)[1:] == [f"good{END}", f"bad{END}"]
    assert all(answer.mask.all() for answer in example.answers)
    sides = {side for side, text in (("chosen", chosen), ("rejected", rejected)) if END in text or "</s>" in text}
    assert {note.rpartition(" in ")[2] for note in report.notes} == sides
    assert all(note.startswith(f"{CUT}: ") for note in report.notes) and nothing.notes == {}


def test_an_end_marker_is_cut_from_every_assistant_turn_and_nobody_elses(tmp_path: Any) -> None:
    """White space before it stays, for that is the answer's; an end marker within the words does, too."""
    turns = [("user", f"q{END}"), ("assistant", f"a {END}\n"), ("user", "r")]
    row = pair([{"role": role, "content": text} for role, text in turns], f"x{END}y{END}")
    [example], report = prepared(tmp_path, [row])
    assert f"q{END}{END}\n" in texts(example)[0] and f"assistant\na {END}\n{START}user\nr" in texts(example)[0]
    assert texts(example)[1] == f"x{END}y{END}"
    cut = [f"{CUT}: {END} in {part}" for part in ("prompt", "chosen")]
    kept = [f"{KEPT}: {END} in {place}" for place in ("prompt (user)", "chosen (assistant)")]
    assert list(report.notes) == [*cut, *kept]


def test_an_answer_that_says_only_its_end_is_dropped(tmp_path: Any) -> None:
    _, report = prepared(tmp_path, [pair("q", "a"), pair("q", f"{END}\n")])
    [row] = report.dropped_rows
    assert (row.row, row.reason) == (2, "empty answer") and END in row.detail
    calling = of_chat("q", END, "no", tool_calls=[{"function": {"name": "f"}}])
    changed, _ = ControlTokens(byte_bpe(chat_template=CHATML), True).with_one_end(calling)
    assert changed.answers[0][0].content == ""  # it calls
    with pytest.raises(Unusable, match="empty message"):
        said = replace(
            of_chat("q", "a"), prompt=(Message("user", "q"), Message("assistant", END), Message("user", "r"))
        )
        ControlTokens(byte_bpe(chat_template=CHATML), True).with_one_end(said)


def test_two_answers_that_differ_in_their_end_marker_are_equal(tmp_path: Any) -> None:
    _, report = prepared(tmp_path, [pair("q", "a"), pair("q", f"same{END}\n", "same")])
    assert report.dropped == {"chosen equals rejected": 1}


def test_a_template_that_writes_no_end_leaves_the_files_own(tmp_path: Any) -> None:
    bare = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    bare += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = byte_bpe(chat_template=bare)
    [example], report = prepared(tmp_path, [pair("q", "good</s>", "bad</s>")], tokenizer)
    assert texts(example)[1:] == ["good</s>", "bad</s>"] and all(note.startswith(KEPT) for note in report.notes)
    assert ControlTokens(byte_bpe(chat_template=INST), True).ends == ["</s>"]


@pytest.mark.parametrize("end", ["", "</s>", "</s>\n", "</s></s>", "</s> </s>\n\n"])
def test_plain_text_has_one_eos_behind_each_answer(tmp_path: Any, end: str) -> None:
    """The house puts it there. What the file wrote before it, in the same place, is the same one."""
    [example], report = prepared(tmp_path, [pair("q ", f"good{end}", f"bad {end}")], template="none")
    assert texts(example) == ["q ", "good</s>", "bad </s>"]
    assert all(answer.mask.all() for answer in example.answers)
    assert list(report.notes) == ([ONE_END] if end not in ("", "</s>") else [])


@pytest.mark.parametrize("said", ["</s>", " </s></s>\n"])
def test_plain_text_of_an_end_marker_alone_is_an_empty_answer(tmp_path: Any, said: str) -> None:
    examples, report = prepared(tmp_path, [pair("q ", said), pair("q ", "good")], template="none")
    assert len(examples) == 1
    assert [(row.reason, row.detail) for row in report.dropped_rows] == [
        ("empty answer", "chosen says only " + repr(said.strip()))
    ]


def test_plain_text_has_the_control_tokens_that_it_writes(tmp_path: Any) -> None:
    """A file that was rendered before is right as it is, and needs no note of that."""
    rendered = pair(f"{START}user\nq{END}\n{START}assistant\n", f"good{END}", f"bad{END}")
    [example], report = prepared(tmp_path, [rendered], byte_bpe(eos=END), template="none")
    [chat], _ = prepared(tmp_path, [pair("q", "good", "bad")])
    assert report.notes == {} and texts(example)[1:] == texts(chat)[1:]
    assert texts(chat)[0] == f"{START}system\nBe kind.{END}\n" + texts(example)[0]


def test_a_file_that_was_rendered_before_is_noted_under_a_template(tmp_path: Any) -> None:
    rows = [pair(f" {START}user\nq{i}{END}\n{START}assistant\n", "good", "bad") for i in range(2)]
    rows.append(pair(f"what is {START}?", "good", "bad"))
    rows.append(pair(f"{END} is what?", "good", "bad"))  # a control token, but none that opens
    _, report = prepared(tmp_path, rows)
    assert [source.row for source in report.notes[RENDERED]] == [1, 2]
    assert [source.row for source in report.notes[f"{KEPT}: {START} in prompt (user)"]] == [1, 2, 3]


def test_what_the_setting_says(tmp_path: Any) -> None:
    """Each row's own words: kept as they are, as characters, or not at all."""
    rows = [pair(f"a{END}b", "good", "bad"), pair("q", "good", f"b{START}d"), pair("q", "good", "bad")]
    kept, noted = prepared(tmp_path, rows)
    asked, noted_too = prepared(tmp_path, rows, control_tokens="keep")
    assert [texts(one) for one in kept] == [texts(one) for one in asked] and noted.notes == noted_too.notes
    spelled, characters = prepared(tmp_path, rows, control_tokens="as_text")
    assert [texts(one) for one in spelled] == [texts(one) for one in kept]
    assert list(characters.notes) == [
        f"{AS_TEXT}: {END} in prompt (user)",
        f"{AS_TEXT}: {START} in rejected (assistant)",
    ]
    count = [[list(part).count(3) for part in (one.prompt_ids, *(a.ids for a in one.answers))] for one in spelled]
    assert count == [[2, 1, 1], [2, 1, 1], [2, 1, 1]] and list(kept[0].prompt_ids).count(3) == 3
    left, report = prepared(tmp_path, rows, control_tokens="drop")
    assert [one.source.row for one in left] == [3] and report.dropped == {WRITTEN: 2}
    assert [row.detail for row in report.dropped_rows] == [
        f"{END} in prompt (user)",
        f"{START} in rejected (assistant)",
    ]


def test_what_the_setting_says_of_plain_text(tmp_path: Any) -> None:
    rows = [pair(f"a{END}", f"{START}b</s>\n", "c</s>"), pair("q", "good", "bad")]
    [example, _], _ = prepared(tmp_path, rows, template="none", control_tokens="as_text")
    assert texts(example) == [f"a{END}", f"{START}b</s>", "c</s>"]
    assert [int((part < 4).sum()) for part in (example.prompt_ids, *(a.ids for a in example.answers))] == [0, 1, 1]
    left, report = prepared(tmp_path, rows, template="none", control_tokens="drop")
    assert [one.source.row for one in left] == [2]
    assert report.dropped_rows[0].detail == f"{END} in prompt, {START} in chosen"


def test_documents_are_text_unless_the_setting_says_otherwise(tmp_path: Any) -> None:
    """What nobody has rendered opens and ends nothing; an end token at the very end is the end, and noted."""
    rows = [{"text": text} for text in (f"a{END}b", f"</s>{START}c", "d</s>", "e")]

    def read(**settings: Any) -> tuple[list[str], list[int], list[str]]:
        found, report = prepared(tmp_path, rows, template="none", **settings)
        words = [texts(example)[-1] for example in found]
        return words, [int((example.answers[0].ids < 4).sum()) for example in found], list(report.notes)

    said = [f"{AS_TEXT}: {END} in answer", f"{AS_TEXT}: </s> in answer", f"{AS_TEXT}: {START} in answer"]
    words = [f"a{END}b</s>", f"</s>{START}c</s>", "d</s>", "e</s>"]
    assert read() == read(control_tokens="as_text") == (words, [1, 1, 1, 1], [*said, ENDED])
    assert read(control_tokens="keep") == (words, [2, 3, 1, 1], [ENDED])
    assert read(control_tokens="drop") == (words[2:], [1, 1], [ENDED])


def test_one_line_says_what_became_of_control_tokens(tmp_path: Any) -> None:
    _, report = prepared(tmp_path, [{"text": "a"}, {"text": f"{END}b{START}"}, {"text": END + "c"}], template="none")
    said = control_line("docs", report)
    assert said.startswith("docs: 2 rows spell control tokens of the tokenizer in their own words (first: ")
    assert said.endswith(
        f":2, encoded as plain characters: {END} in answer). data.control_tokens says what these are: keep, as_text "
        "or drop"
    )
    _, report = prepared(tmp_path, [pair(f"a{END}b", "good", "bad")])
    assert f"kept: {END} in prompt (user)" in control_line("pairs", report)
    _, report = prepared(tmp_path, [{"text": "a</s>"}], template="none")
    assert control_line("docs", report) == ""


def test_very_many_end_markers_are_gone_through_once(tmp_path: Any) -> None:
    said = "yes" + f" \n{END}" * 200_000
    with within(60):
        examples, _ = prepared(tmp_path, [pair("hi", said)], max_length=50)
        assert texts(examples[0])[1] == f"yes \n{END}"
        kept = pair("hi", f"{END * 20_000}a")
        examples, _ = prepared(tmp_path, [kept], max_length=10**6, control_tokens="as_text")
    assert len(examples) == 1
