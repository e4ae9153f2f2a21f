"""What a tokenizer.json asks for is looked at before the library obeys it."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.bounds import within, without_much_memory
from tests.data.tiny_tokenizers import byte_bpe
from tests.models.hf.folders import folder_of
from tuningfork.errors import ModelError
from tuningfork.models.hf import tokenizer_file
from tuningfork.models.hf.load import load_tokenizer
from tuningfork.models.hf.tokenizer_file import check_tokenizer_file, growth


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


def charsmap(*texts: str) -> dict[str, Any]:
    table = (8).to_bytes(4, "little") + bytes(8) + b"\0".join(text.encode() for text in texts) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


GROWTH = [
    (None, 1),
    ({"type": "NFKC"}, 1),
    (replace({"String": " "}, "▁"), 1),
    (replace({"Regex": " {2,}"}, "▁"), 1),
    (sequence({"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")), 2),
    (sequence(replace({"String": "``"}, '"'), replace({"String": "''"}, '"')), 1),
    (charsmap(" ", "fi", "1⁄4"), 3),
    (replace({"String": "a"}, "a" * 10), 10),
    (sequence(*[replace({"String": "a"}, "aa")] * 20), 2**20),
    (sequence(*[replace({"Regex": "(?=a)"}, "a")] * 20), 2**20),  # a match of no letters
    (sequence(*[replace({"Regex": r"\p{L}*"}, "a")] * 20), 2**20),  # not Python's, and so perhaps of none
    (sequence(*[replace({"String": "a"}, "a" * 99)] * 400), float("inf")),
    (sequence(charsmap("a" * 50), charsmap("b" * 50)), 2500),
    (sequence(*[{"type": "ByteLevel"}] * 10), 2**10),
    ({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 10}, 2**10),
]


@pytest.mark.parametrize(("rules", "expected"), GROWTH)
def test_what_may_become_of_one_letter(rules: dict[str, Any], expected: float) -> None:
    assert growth(rules) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_bpe().save_pretrained(folder_of(tmp_path / "model"))
    return tmp_path / "model"


def change(folder: Path, **values: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as raised, within(60), without_much_memory():
        load_tokenizer(str(folder))
    return str(raised.value)


def test_rules_that_write_ever_longer_text_are_not_obeyed(folder: Path) -> None:
    assert load_tokenizer(str(folder)).decode([4]) == "!"
    rules = [replace({"String": "o"}, "o" * 10)] * 12
    change(folder, normalizer={"type": "Sequence", "normalizers": rules})
    assert "tokenizer.json: the rules of its normalizer can make more than 32 letters of one" in refused(folder)
    change(folder, normalizer=None, decoder={"type": "Sequence", "decoders": [*rules, {"type": "Fuse"}]})
    assert "tokenizer.json: the rules of its decoder can" in refused(folder)


@pytest.mark.parametrize(
    ("part", "rules"), [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")]
)
def test_letters_that_are_written_as_bytes_again_and_again(folder: Path, part: str, rules: str) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    change(folder, **{part: {"type": "Sequence", rules: [byte_level] * 40}})
    assert f"tokenizer.json: the rules of its {part} can make more than 32 letters of one" in refused(folder)


def test_more_rules_than_anybody_needs(folder: Path) -> None:
    within_one = {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 13}
    change(folder, normalizer={"type": "Sequence", "normalizers": [within_one] * 5})
    assert "tokenizer.json: its normalizer has 65 rules, 64 at most" in refused(folder)


def template(*single: str, ids: int = 1) -> dict[str, Any]:
    pieces = [{"Sequence" if name in "AB" else "SpecialToken": {"id": name, "type_id": 0}} for name in single]
    token = {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"<s>": token}}


def test_templates_that_put_too_much_together(folder: Path) -> None:
    for wrong in (template(*["<s>"] * 1000, "A"), template("<s>", "A", ids=1000)):
        change(folder, post_processor={"type": "Sequence", "processors": [wrong]})
        assert "its post_processor has a template of 1,001 pieces, 1,000 at most" in refused(folder)
    change(folder, post_processor=template(*["A"] * 33))
    assert "the rules of its post_processor can make more than 32 letters of one" in refused(folder)
    change(folder, post_processor=template("<s>", "A"))
    check_tokenizer_file(str(folder))


def test_tokens_that_are_left_to_chance(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=model | {"dropout": 0.5})
    assert "tokenizer.json: its model sets dropout to 0.5: the same text would get other tokens" in refused(folder)
    change(folder, model=model | {"dropout": 0.0})
    check_tokenizer_file(str(folder))


def test_words_of_any_length_where_they_are_looked_through_again_and_again(folder: Path) -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {"[UNK]": 0}}
    change(folder, model={**model, "max_input_chars_per_word": 1001})
    assert (
        "tokenizer.json: its model looks into words of 1,001 letters (max_input_chars_per_word), 1,000 at"
        in refused(folder)
    )
    change(folder, model={**model, "max_input_chars_per_word": 1000})
    check_tokenizer_file(str(folder))


def test_two_tokens_of_one_id(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary = model["vocab"]
    change(folder, model=model | {"vocab": vocabulary | {"!!": vocabulary["!"]}})
    assert f"its vocabulary gives '!' and '!!' one id, {vocabulary['!']}" in refused(folder)


def test_too_many_tokens_beside_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "ADDED", 4)
    check_tokenizer_file(str(folder))
    monkeypatch.setattr(tokenizer_file, "ADDED", 3)
    assert "tokenizer.json: has 4 added_tokens, 3 at most" in refused(folder)


def token(text: str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def named(count: int) -> list[str]:
    return [f"<t{i}>" for i in range(count)]


def beside(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


MANY: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "extra special tokens": ("tokenizer_config.json", lambda n: {"extra_special_tokens": named(n)}),
    "by name": (
        "tokenizer_config.json",
        lambda n: {"extra_special_tokens": {f"a{i}": t for i, t in enumerate(named(n))}},
    ),
    "as additional ones": ("special_tokens_map.json", lambda n: {"additional_special_tokens": [*map(token, named(n))]}),
    "under any key": ("special_tokens_map.json", lambda n: {f"{t}_token": t for t in named(n)}),
    "the same again": ("tokenizer_config.json", lambda n: {"extra_special_tokens": ["<a>"] * n}),
    "with numbers": (
        "tokenizer_config.json",
        lambda n: {"added_tokens_decoder": {str(300 + i): token(t) for i, t in enumerate(named(n))}},
    ),
    "with numbers, by text": ("added_tokens.json", lambda n: {t: 300 + i for i, t in enumerate(named(n))}),
}


@pytest.mark.parametrize("kind", MANY)
def test_too_many_tokens_in_the_files_beside(folder: Path, kind: str) -> None:
    """Wherever the library takes them from, it adds each of them to those of tokenizer.json."""
    name, values = MANY[kind]
    beside(folder, name, **values(60_001))
    assert re.search(r"(has|list) 60,0\d+ (added|special) tokens, (60|5),000 at most", refused(folder))


def test_too_many_tokens_in_all_files_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "ADDED", 9)
    beside(folder, "added_tokens.json", **{text: 300 + i for i, text in enumerate(named(5))})
    check_tokenizer_file(str(folder))
    beside(folder, "added_tokens.json", **{"<t5>": 305})
    assert "tokenizer.json: has 10 added tokens with those of the files beside it, 9 at most" in refused(folder)


def test_tokens_that_the_library_would_compare_with_each_other(folder: Path) -> None:
    """It takes a microsecond or two for each pair."""
    beside(folder, "tokenizer_config.json", extra_special_tokens=[f"<x{i}>" for i in range(100)])
    beside(folder, "added_tokens.json", **{text: 300 + i for i, text in enumerate(named(50_000))})
    assert re.search(r"name 50,1\d\d tokens that no tokenizer\.json has, 1\d\d of them in lists", refused(folder))
    beside(folder, "tokenizer_config.json", extra_special_tokens=[])
    check_tokenizer_file(str(folder))


@pytest.mark.parametrize("number", [10**9, 10**18, -(10**9)])
def test_a_token_far_behind_all_others(folder: Path, number: int) -> None:
    """The library fills the ids before it with tokens of its own."""
    beside(folder, "tokenizer_config.json", added_tokens_decoder={str(number): token("<far>")})
    assert f"tokenizer_config.json gives a token the id {number}, and no vocabulary has so many" in refused(folder)
    beside(folder, "tokenizer_config.json", added_tokens_decoder={})
    beside(folder, "added_tokens.json", **{"<far>": number})
    assert f"added_tokens.json gives a token the id {number}, and no vocabulary has so many" in refused(folder)


FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "tekken.json")


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_a_file_that_is_read_as_a_whole_has_a_bound(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("ab") as file:
        file.truncate(8 << 30)  # without a byte on the disk
    most = "1,048,576" if name.endswith(".jinja") else "134,217,728"
    assert f"{folder}: {name} has 8,589,934,592 bytes, {most} at most" in refused(folder)


@pytest.mark.parametrize("what", ["a pipe", "a link to a device", "a link to nothing"])
def test_a_template_of_several_that_is_no_file(folder: Path, what: str) -> None:
    path = folder / "additional_chat_templates" / "tools.jinja"
    path.parent.mkdir()
    os.mkfifo(path) if what == "a pipe" else path.symlink_to("/dev/zero" if "device" in what else "nothing")
    said = "is a link that leads nowhere" if "nothing" in what else "is neither a file nor a folder"
    assert f"{folder}: additional_chat_templates/tools.jinja {said}" in refused(folder)


def test_more_values_than_any_file_has(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"added_tokens": [' + "{}," * 20_000_000 + "{}]}")
    assert "tokenizer.json: is not JSON (it has more than 10,000,000 values)" in refused(folder)


def test_a_file_that_is_none(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[" * 100_000)
    assert "tokenizer.json: is not JSON" in refused(folder)
    (folder / "tokenizer.json").write_text("[]")
    assert "tokenizer.json: holds no JSON object" in refused(folder)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read \(it is a named pipe"), within(20):
        check_tokenizer_file(str(folder))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(o"}, "behavior": "Isolated", "invert": False}},
        {"added_tokens": [{"id": -1, "content": "x"}]},
        {"normalizer": {"type": "Replace", "pattern": {}, "content": 3}},
        {"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}},
    ],
)
def test_whatever_the_library_fails_with_names_the_folder(folder: Path, wrong: dict[str, Any]) -> None:
    change(folder, **wrong)
    assert refused(folder).startswith(f"{folder}: the tokenizer cannot be loaded: ")


def test_what_the_library_did_not_foresee_names_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own failures are no Exception; an order to end is none either, and is obeyed."""
    kind: type[BaseException] = type("PanicException", (BaseException,), {})

    def fails(*_: Any, **__: Any) -> None:
        raise kind("index out of bounds")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    assert refused(folder) == f"{folder}: the tokenizer cannot be loaded: index out of bounds."
    kind = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(str(folder))
