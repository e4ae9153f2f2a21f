"""Models of the hub: what is a name of one, what is fetched of it, and what is said where it is not to be had."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.models.hf.hub_cache import COMMIT, put_in_cache
from tuningfork.errors import ModelError
from tuningfork.models.hf import hub
from tuningfork.models.hf.hub import HubName, fetch, hub_name


@pytest.mark.parametrize(
    "path, name",
    [
        ("meta-llama/Llama-3.2-1B", HubName("meta-llama/Llama-3.2-1B", None)),
        ("o/n@main", HubName("o/n", "main")),
        ("o/n@refs/pr/3", HubName("o/n", "refs/pr/3")),
        ("hub:o/n", HubName("o/n", None)),
        ("hub:here/model@v1", HubName("here/model", "v1")),
        ("here/model", None),  # there is such a folder
        ("here/modle", None),  # a folder beside it was meant
        ("./model", None),
        ("../o/n", None),
        ("/o/n", None),
        ("~/n", None),
        ("model", None),
        ("o/n/m", None),
        ("", None),
        ("o/n@", None),
        ("o/n@../../n", None),
        ("o/..", None),
        ("o/n\n", None),
        ("o/n@a b", None),
    ],
)
def test_a_path_that_is_here_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: HubName | None
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name(path) == name


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_copy_in_the_cache_serves_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """As the hub lays it out: references, snapshots by commit, and links to blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    snapshot = put_in_cache(tmp_path / "hub", "o/n", tmp_path / "model")
    folder, fixed = fetch(HubName("o/n", revision))
    assert Path(folder) == snapshot and fixed == HubName("o/n", COMMIT) and fixed.is_fixed
    with pytest.raises(ModelError, match="o/n@other"):
        fetch(HubName("o/n", "other"))


def test_no_pickle_and_no_code_is_fetched_and_bytes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        with options["tqdm_class"](desc="Fetching 3 files", total=3) as files:
            files.update(1)
        bar = options["tqdm_class"](desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True, name="x")
        bar.total += 40
        bar.update(10)
        bar.update(30)
        return str(tmp_path / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told: list[tuple[int, int]] = []
    assert fetch(HubName("o/n", "v1"), progress=lambda *of: told.append(of)) == (
        str(tmp_path / COMMIT),
        HubName("o/n", COMMIT),
    )
    assert (asked["repository"], asked["revision"]) == ("o/n", "v1") and told == [(10, 40), (40, 40)]

    def taken(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in asked["ignore_patterns"])

    wanted = "config.json model-00001-of-00002.safetensors model.safetensors.index.json tokenizer.json tokenizer.model "
    wanted += (
        "vocab.json merges.txt chat_template.jinja additional_chat_templates/a.jinja generation_config.json LICENSE"
    )
    refused = "modeling_x.py tokenizer_x.py pytorch_model.bin model.pt vocab.bin training_args.bin x.gguf tf_model.h5 "
    refused += "original/consolidated.00.pth consolidated.safetensors onnx/model.onnx onnx/config.json a/b.safetensors"
    assert [name for name in wanted.split() if not taken(name)] == []
    assert [name for name in refused.split() if taken(name)] == []
    fetch(HubName("o/n", "v1"), weights=False)
    assert not taken("model.safetensors") and taken("tokenizer.json") and taken("config.json")


def test_what_cannot_be_had_is_said_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError) as caught:
        fetch(HubName("o/n", "v1"))
    message = str(caught.value)
    assert "there is no folder o/n@v1 here" in message and "HF_HUB_OFFLINE is set" in message
    assert "hf download o/n --revision v1 --include '*.safetensors' '*.json'" in message
    assert "set model.path to it" in message and f"models--o--n from its hub cache into {tmp_path / 'hub'}" in message

    def unreachable(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError: no route to host\nmore")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"ConnectError: no route to host\. Check the network\."):
        fetch(HubName("o/n", None))
