"""Model folders that are made to hang, to take all memory, or to end in a traceback: each is refused in words."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bounds import within, without_much_memory
from tests.models.hf.folders import edit, folder_of, refused, rewrite
from tuningfork.errors import ModelError, OutOfMemory
from tuningfork.models.hf import folder
from tuningfork.models.hf import load as loading
from tuningfork.models.hf.load import load, load_config, load_tokenizer

HUGE = {
    "num_hidden_layers": 10**7,
    "hidden_size": 10**9,
    "vocab_size": 10**12,
    "intermediate_size": 10**12,
    "num_attention_heads": 10**10,
    "head_dim": 10**15,
    "max_position_embeddings": 10**30,
    "num_labels": 10**9,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])  # of which some list their layers in the config
@pytest.mark.parametrize("name", HUGE)
def test_sizes_that_no_model_has_are_refused_by_name(tmp_path: Path, name: str, family: str) -> None:
    """Before a config makes lists of that length, or a class is built."""
    edit(folder_of(tmp_path, family) / "config.json", **{name: HUGE[name]})
    with within(60):
        refused(tmp_path, rf"(sets|and) {name} to ({HUGE[name]}|{HUGE[name]:,})\b")
    if HUGE[name] >= 2**31 or name in ("num_hidden_layers", "num_labels"):
        for loader in (load_config, load_tokenizer):
            with within(20), pytest.raises(ModelError, match=rf"{name} to {HUGE[name]}; there is no such model"):
                loader(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 10**5), ("vocab_size", 10**8), ("intermediate_size", 10**8), ("head_dim", 10**7)],
)
def test_a_model_that_is_larger_than_its_weights_gets_no_memory(tmp_path: Path, name: str, value: int) -> None:
    """The library would make every tensor of another shape, and fill it."""
    edit(folder_of(tmp_path) / "config.json", **{name: value})
    with within(60):
        refused(tmp_path, rf"describes a model of [\d,]+ numbers, .* the weights hold [\d,]+ .*{name} to {value:,}")


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    edit(folder_of(tmp_path) / "config.json", num_hidden_layers=5000)
    with within(20):
        refused(tmp_path, r"config\.json sets num_hidden_layers to 5,000, but the weights hold 39 tensors; get config")


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [-1, 0])
def test_sizes_that_are_none(tmp_path: Path, name: str, value: int) -> None:
    edit(folder_of(tmp_path) / "config.json", **{name: value})
    refused(tmp_path, rf"config\.json sets {name} to {value}; there is no such model")


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}, 2.5, True])
def test_sizes_of_another_type(tmp_path: Path, value: object) -> None:
    edit(folder_of(tmp_path) / "config.json", hidden_size=value)
    refused(tmp_path, r"config\.json")


@pytest.mark.parametrize(
    "name",
    ["(dropout", "drop[", "noise\\", "drop{2,1}", r"(?:drop|(?:\s|\S)*?)*?zzzz", "(drop|drop)*!", "jitter|.", "drop\n"],
)
def test_a_setting_that_is_called_as_a_pattern_is_none(tmp_path: Path, name: str) -> None:
    """It stands for itself, and nobody's code reads it."""
    edit(folder_of(tmp_path) / "config.json", **{name: 0.1})
    with within(60):
        load(str(tmp_path))


def test_many_settings_that_look_like_rates(tmp_path: Path) -> None:
    """Code is gone through once, not for each of them."""
    edit(folder_of(tmp_path) / "config.json", **{f"dropout_{i}": 0.1 for i in range(20_000)}, attention_dropout=0.5)
    with within(60):
        refused(tmp_path, r"config\.json sets attention_dropout to 0\.5\. ")


@pytest.mark.parametrize("piece", ["n_", "num_", "vision", "audio_", "_n_layers", "drop", "size_"])
def test_a_name_that_goes_on_and_on_is_looked_at_once(tmp_path: Path, piece: str) -> None:
    edit(folder_of(tmp_path) / "config.json", **{piece * 50_000: 1})
    with within(20):
        refused(tmp_path, r"config\.json cannot be read: an object has a name of [\d,]+ letters, 1,000 at most")
    names = {piece * (990 // len(piece)) + str(i): 1 for i in range(10_000)}
    edit(folder_of(tmp_path / "many") / "config.json", **names)
    with within(60):
        load_config(str(tmp_path / "many"))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *dict.fromkeys(
            ["n_layer", "num_hidden_layers", "decoder_num_blocks", "num_labels", "n_local_experts"], True
        ).items(),
        *dict.fromkeys(["layers", "number_layers", "num_layers_kept", "xn_layer", "n_layered"], False).items(),
    ],
)
def test_what_counts_something_has_a_bound(tmp_path: Path, name: str, counts: bool) -> None:
    edit(folder_of(tmp_path) / "config.json", **{name: 10**7})
    if counts:
        refused(tmp_path, rf"sets {name} to 10000000; there is no such model")
    else:
        load_config(str(tmp_path))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    folder_of(tmp_path)
    content = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
    text = json.dumps({**content, "outer": {"inner": 0}}).replace('"inner": 0', f'"inner": {value}')
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=rf"{name} cannot be read: outer\.inner is -?(nan|inf), which is no number"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"],
)
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\0\0", b"\xff{}", b'{"a":', b'{"a":' * 10**5, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_broken_json_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (folder_of(tmp_path) / name).write_bytes(content)
    with within(20), pytest.raises(ModelError, match=rf"{tmp_path}: {name} cannot be read: .*\. Mend it, or "):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "LICENSE", "other"]
)
def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for loader in (load, load_config, load_tokenizer):
        with within(20), pytest.raises(ModelError, match=rf"{name} is neither a file nor a folder"):
            loader(str(tmp_path))


@pytest.mark.parametrize("kind", ["a folder", "a link to itself", "a link to nothing"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
)
def test_what_is_no_file_under_the_name_of_one(tmp_path: Path, name: str, kind: str) -> None:
    """A reader may go on without it: without generation settings, or with another template."""
    folder_of(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "a folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(name if kind == "a link to itself" else "nothing")
    what = "a folder" if kind == "a folder" else "a link that leads nowhere"
    for loader in (load, load_config, load_tokenizer):
        with pytest.raises(ModelError, match=rf"{tmp_path}: {name} is {what}, not a file\. Put the file itself there"):
            loader(str(tmp_path))


def test_what_lies_beside_the_weights_is_bounded(tmp_path: Path) -> None:
    with (folder_of(tmp_path) / "LICENSE").open("wb") as file:
        file.truncate(2 << 30)  # without a byte on the disk
    refused(tmp_path, r"beside the weights is larger than 1,073,741,824 bytes; the largest is LICENSE")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_names_files_of_its_folder(tmp_path: Path, file: str) -> None:
    (folder_of(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    refused(tmp_path, rf"index\.json names {file}, which lies outside of the folder")


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "content",
    {
        "empty": b"",
        "short": b"\1\2\3",
        "giant header": safetensors(b"{}", length=2**64 - 1),
        "header behind the end": safetensors(b"{}", length=1000),
        "no json": safetensors(b"{x}"),
        "a list": safetensors(b"[]"),
        "no utf-8": safetensors(b'{"\xff": 1}'),
        "nested": safetensors(b'{"a":' * 100_000),
        "shape that overflows": safetensors(entry([2**40, 2**40], [0, 4]), b"1234"),
        "shape of other size": safetensors(entry([2], [0, 4]), b"1234"),
        "negative shape": safetensors(entry([-1], [0, 4]), b"1234"),
        "offsets behind the end": safetensors(entry([2**20], [0, 2**22]), b"1234"),
        "offsets that cross": safetensors(entry([1], [4, 0]), b"1234"),
        "negative offsets": safetensors(entry([1], [-4, 0]), b"1234"),
        "unknown dtype": safetensors(entry([1], [0, 4], "F33"), b"1234"),
        "dtype that is none": safetensors(b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}', b"1234"),
        "no offsets": safetensors(b'{"a": {"dtype": "F32", "shape": [1]}}', b"1234"),
        "overlap": safetensors(
            json.dumps({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}).encode(), b"1234"
        ),
        "a hole": safetensors(entry([1], [4, 8]), b"12345678"),
        "bytes behind the tensors": safetensors(entry([1], [0, 4]), b"12345678"),
        "metadata of no text": safetensors(b'{"__metadata__": {"a": 1}}'),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_weight_file_with_a_broken_header(tmp_path: Path, content: tuple[str, bytes]) -> None:
    (folder_of(tmp_path) / "model.safetensors").write_bytes(content[1])
    with within(20):
        refused(tmp_path, r"the model cannot be loaded: .*A file of its weights is damaged or cut short: get it anew")


class Called:
    """Pickled as a call of something plain."""

    def __init__(self, what: Any, *given: Any) -> None:
        self.call = (what, given)

    def __reduce__(self) -> tuple[Any, Any]:
        return self.call


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("tensors", "said"),
    {
        "one number, again and again": ({EMBEDDING: torch.zeros(1).expand(6_000_000, 32)}, "is larger than what"),
        "one row, again and again": ({EMBEDDING: torch.zeros(32).expand(6_000_000, 32)}, "is larger than what"),
        "windows that overlap": ({EMBEDDING: torch.zeros(4096).unfold(0, 2048, 1)}, "is larger than what"),
        "one tensor by many names": (dict.fromkeys(map(str, range(100)), torch.zeros(100_000)), "is larger than what"),
        "no memory at all": ({EMBEDDING: torch.empty(10**9, 32, device="meta")}, f"{EMBEDDING} is no plain tensor"),
        "sparse": ({EMBEDDING: torch.zeros(97, 32).to_sparse()}, f"{EMBEDDING} is no plain tensor"),
        "a number": ({EMBEDDING: 3}, f"{EMBEDDING} is no plain tensor"),
        "a table within": ({"state_dict": {EMBEDDING: torch.zeros(97, 32)}}, "state_dict is no plain tensor"),
        "a list": ([torch.zeros(97, 32)], "holds no table of tensors"),
        "no name": ({3: torch.zeros(3)}, "calls a tensor 3, which is no name"),
        "a long name": ({"layers." * 1000: torch.zeros(3)}, r"calls a tensor 'layers\.layers.*, which is no name"),
        "much memory": ({EMBEDDING: Called(bytearray, 3 << 30)}, "loading the weights of .*: "),
    }.values(),
)
def test_older_weights_that_say_little_and_mean_much(tmp_path: Path, legacy: bool, tensors: Any, said: str) -> None:
    (folder_of(tmp_path) / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with within(60), without_much_memory(6 << 30), pytest.raises((ModelError, OutOfMemory), match=said) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value) or isinstance(caught.value, OutOfMemory)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "a.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: "a.bin"}}))
    with within(60), without_much_memory(6 << 30), pytest.raises((ModelError, OutOfMemory), match=said):
        load(str(tmp_path))


def test_older_weights_that_are_packed(tmp_path: Path) -> None:
    model = load(str(folder_of(tmp_path))).model
    (tmp_path / "model.safetensors").unlink()
    weights = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), weights)
    assert load(str(tmp_path)).model is not None
    with zipfile.ZipFile(weights) as plain:
        entries = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(weights, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    refused(tmp_path, r"pytorch_model\.bin: is packed, which PyTorch's own files are not")


def test_a_name_of_a_tensor_that_is_none(tmp_path: Path) -> None:
    rewrite(folder_of(tmp_path), lambda weights: weights.update({"layers." * 1000: torch.zeros(3)}))
    refused(tmp_path, r"model\.safetensors: calls a tensor 'layers\.layers.*, which is no name of one")


def test_no_tensor_at_all(tmp_path: Path) -> None:
    (folder_of(tmp_path) / "model.safetensors").write_bytes(safetensors(b"{}"))
    refused(tmp_path, r"sets num_hidden_layers to 4, but the weights hold 0 tensors")


def test_text_that_has_no_utf_8_can_be_exported() -> None:
    """A config may spell half a surrogate pair; hours of training must not end with that."""
    assert json.loads(folder.to_json({"a": "\ud800"})) == {"a": "\ud800"}


@pytest.mark.parametrize("straight", [True, False])
def test_weights_that_are_larger_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: bool
) -> None:
    """Linux gives out more memory than there is, and ends the process that uses it."""
    folder_of(tmp_path)
    if not straight:
        monkeypatch.setattr(loading, "_draft", lambda *_: None)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}[name])
    with pytest.raises(OutOfMemory) as caught:
        load(str(tmp_path))
    what, ways_out = str(caught.value).splitlines()
    assert what.startswith(f"loading the weights of {tmp_path}, 0.0 GB on the disk: they need 0.0 GB, and this machine")
    assert "model.weights: bfloat16" in ways_out and "pack.tokens" not in ways_out


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_not_called_a_broken_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refusing(*_: object) -> None:
        raise error

    monkeypatch.setattr(loading, "_draft", refusing)
    with pytest.raises(OutOfMemory, match=rf"loading the weights of {folder_of(tmp_path)}, 0\.0 GB on the disk: "):
        load(str(tmp_path))


def test_a_sound_folder_passes_all_of_this(tmp_path: Path) -> None:
    assert load(str(folder_of(tmp_path))).stored_dtype == torch.float32
