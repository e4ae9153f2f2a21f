"""Checkpoints that somebody else wrote: whatever their files call for, nothing of it is run."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from tests.bounds import within
from tests.payload import Payload
from tests.train.test_checkpoint import PROGRESS, parts
from tuningfork.errors import RunFolderError
from tuningfork.files import DIGESTS, seal
from tuningfork.train.checkpoint import restore, restore_weights, save
from tuningfork.train.checkpoint_reader import METADATA, PlainReader

DATA = "__0_0.distcp"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once a payload has been run."""
    return tmp_path / "ran"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", PROGRESS, *parts(), keep_last=2)


def refused(path: Path, why: str, cure: str = "begin a new one in another output.dir") -> str:
    """What is said of a checkpoint whose checksums are right, as those of whoever made it are."""
    (path / DIGESTS).unlink()
    seal(path)
    model, optimizer = parts()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(RunFolderError, match=why) as caught:
        restore(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    message = str(caught.value)
    assert str(path) in message and (cure in message or "bytes" in message) and "\n" not in message
    return message


def edit(path: Path, change: Callable[[Metadata], object]) -> None:
    """Change what `.metadata` says, in the form that the library writes."""
    metadata = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def test_a_payload_is_run_by_those_who_load_it(ran):
    """Guards the guard."""
    pickle.loads(pickle.dumps(Payload(ran)))
    assert ran.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_that_is_a_program(saved, ran, protocol):
    (saved / METADATA).write_bytes(pickle.dumps(Payload(ran), protocol))
    assert "Nothing of it was run" in refused(saved, r"\.metadata: it calls for 'posix\.mkdir'")
    assert not ran.exists()


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "state_dict_metadata", "version", "anything"])
def test_a_program_within_sound_metadata(saved, ran, place):
    edit(saved, lambda metadata: setattr(metadata, place, Payload(ran)))
    refused(saved, r"\.metadata: it calls for 'posix\.mkdir'")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["builtins.getattr", "builtins.eval", "torch.load", "torch.hub.load", "torch.Tensor"])
def test_metadata_may_call_for_nothing_but_its_own_classes(saved, name):
    module, _, attribute = name.rpartition(".")
    (saved / METADATA).write_bytes(b"c" + f"{module}\n{attribute}\n".encode() + b".")
    refused(saved, rf"\.metadata: it calls for '{name}'")


def test_a_dotted_name_does_not_lead_out_of_a_class(saved):
    (saved / METADATA).write_bytes(pickle.dumps(TensorProperties.create_from_tensor))
    refused(saved, r"\.metadata: it calls for ")


def test_a_class_is_never_changed(saved):
    """The second of two states goes to an object's attributes, and those of a class belong to the whole process."""
    name = f"c{Metadata.__module__}\nMetadata\n".encode()
    state = pickle.dumps((None, {"read_by": "everyone"}), 2)[2:-1]
    (saved / METADATA).write_bytes(b"\x80\x02" + name + state + b"b.")
    refused(saved, r"\.metadata: it is broken, or holds more than tensors and plain values")
    assert not hasattr(Metadata, "read_by")
    pickle.loads((saved / METADATA).read_bytes())
    assert hasattr(Metadata, "read_by")  # guards the guard
    del Metadata.read_by


def test_a_program_in_place_of_a_plain_value(saved, ran):
    """A checkpoint has none: what is no tensor is not even opened."""
    edit(saved, lambda metadata: metadata.state_dict_metadata.update(rng=BytesStorageMetadata()))
    refused(saved, r"rng is not stored as one whole tensor")
    assert not ran.exists()


def rows(first: int, count: int) -> ChunkStorageMetadata:
    """Some rows of a matrix."""
    return ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([count, 40]))


WHOLE = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([40, 40]))


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [WHOLE, WHOLE],
        [WHOLE] * 300_000,
        [replace(WHOLE, sizes=torch.Size([1, 1]))],
        [rows(0, 20)],
        [rows(0, 20), rows(21, 19)],
        [rows(0, 20), rows(19, 20)],
        [rows(0, 20), rows(0, 20)],
        [rows(0, 20), rows(20, 30)],
        [rows(0, 50), rows(50, -10)],
        [rows(0, 20), ChunkStorageMetadata(torch.Size([20, 0]), torch.Size([20, 20]))],
        [replace(WHOLE, sizes=torch.Size([10**12, 10**12]))],
        [replace(WHOLE, offsets=torch.Size([-5, 0]))],
        [replace(WHOLE, offsets=torch.Size([1, 0]))],
        None,
        [7],
    ],
)
@pytest.mark.parametrize("entry", ["model.weight", "optimizer.state.weight.exp_avg"])
def test_no_part_of_a_tensor_keeps_what_the_model_had(saved, entry, chunks):
    edit(saved, lambda metadata: setattr(metadata.state_dict_metadata[entry], "chunks", chunks))
    with within(20):
        refused(saved, rf"{entry} is not stored as one whole tensor|has more than [\d,]+ bytes")


@pytest.mark.parametrize("entry", ["model.weight", "optimizer.state.bias.exp_avg_sq", "rng"])
def test_a_checkpoint_has_exactly_what_the_run_has(saved, entry):
    def moved(metadata: Metadata, to: str) -> None:
        metadata.state_dict_metadata[to] = metadata.state_dict_metadata[entry]

    edit(saved, lambda metadata: moved(metadata, "model.other"))
    refused(saved, "it holds more than this run has: model.other", cure="Remove that folder")
    edit(saved, lambda metadata: metadata.state_dict_metadata.pop("model.other"))
    edit(saved, lambda metadata: metadata.state_dict_metadata.pop(entry))
    refused(saved, f"it holds less than this run has: {entry}", cure="Remove that folder")


def test_the_weights_alone_are_checked_too(saved):
    edit(saved, lambda metadata: setattr(metadata.state_dict_metadata["model.bias"], "chunks", []))
    (saved / DIGESTS).unlink()
    seal(saved)
    with pytest.raises(RunFolderError, match=r"model\.bias is not stored as one whole tensor"):
        restore_weights(saved, *parts())


DEEP = b"N" + b"\x85" * 200_000  # a tuple of a tuple of a tuple ..
DOUBLING = b"N" + b"q\x00h\x00\x86" * 60  # a tuple of twice the same, 60 times: to hash it takes 2^60 steps


@pytest.mark.parametrize("nested", [DEEP, DOUBLING])
@pytest.mark.parametrize(
    "hashed",
    [
        b"\x80\x02}%sNs.",
        b"\x80\x02}(%sNu.",
        b"\x80\x02c" + _MEM_FORMAT_ENCODING.__module__.encode() + b"\n_MEM_FORMAT_ENCODING\n%s\x85R.",
        b"\x80\x02c" + _MEM_FORMAT_ENCODING.__module__.encode() + b"\n_MEM_FORMAT_ENCODING\n%s\x85\x81.",
        b"\x80\x02ctorch.serialization\n_get_layout\n%s\x85R.",
        b"\x80\x04\x8f(%s\x90.",
        b"\x80\x04(%s\x91.",
        b"\x80\x02}c" + MetadataIndex.__module__.encode() + b"\nMetadataIndex\n)\x81}(X\x03\x00\x00\x00fqn%sX\x06"
        b"\x00\x00\x00offsetNX\x05\x00\x00\x00indexNubNs.",
    ],
)
def test_nothing_nested_is_hashed(saved, hashed, nested):
    """It would end the process, or take for ever."""
    (saved / METADATA).write_bytes(hashed.replace(b"%s", nested))
    with within(20):
        refused(saved, r"\.metadata")


def test_metadata_that_is_far_too_large_is_not_read(saved):
    os.truncate(saved / METADATA, 100 << 30)
    (saved / DIGESTS).write_text("{}")
    with within(20), pytest.raises(RunFolderError, match=r"\.metadata has more than [\d,]+ bytes"):
        restore(saved, *parts())


@pytest.mark.parametrize("entry", ["model.weight", "optimizer.state.bias.exp_avg", "rng"])
def test_a_program_in_place_of_a_tensor(saved, ran, entry):
    program = io.BytesIO()
    torch.save(Payload(ran), program)
    end = (saved / DATA).stat().st_size
    with (saved / DATA).open("ab") as file:
        file.write(program.getvalue())

    def points_to_it(metadata: Metadata) -> None:
        [place] = [index for index in metadata.storage_data if index.fqn == entry]
        metadata.storage_data[place] = _StorageInfo(DATA, end, len(program.getvalue()))

    edit(saved, points_to_it)
    assert "Nothing of it was run" in refused(saved, r"it calls for 'posix\.mkdir'")
    assert not ran.exists()


ELSEWHERE = ({"relative_path": path} for path in ("../other.distcp", "/dev/zero", "..", 7))


@pytest.mark.parametrize("change", [*ELSEWHERE, {"transform_descriptors": ["x"]}])
def test_metadata_names_plain_files_beside_it_only(saved, change):
    def points_elsewhere(metadata: Metadata) -> None:
        index = MetadataIndex("model.weight", [0, 0])
        metadata.storage_data[index] = replace(metadata.storage_data[index], **change)

    edit(saved, points_elsewhere)
    refused(saved, r"\.metadata does not say what lies where in the files beside it")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metadata_and_what_it_names_are_plain_files(saved, tmp_path, kind):
    """Also where digests.json says nothing of them."""
    (data,) = saved.glob("*.distcp")
    (saved / DIGESTS).write_text("{}")
    for file in (data, saved / METADATA):
        file.rename(tmp_path / "elsewhere")
        os.mkfifo(file) if kind == "pipe" else file.symlink_to(tmp_path / "elsewhere")
        model, optimizer = parts()
        with within(20), pytest.raises(RunFolderError, match=rf"{re.escape(file.name)} is a (link|named pipe)"):
            restore(saved, model, optimizer)
        file.unlink()
        (tmp_path / "elsewhere").rename(file)


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({}), pickle.dumps([]), b"N.", b"0."])
def test_metadata_that_is_none(saved, content):
    (saved / METADATA).write_bytes(content)
    refused(saved, r"\.metadata")


def test_what_is_read_is_what_the_library_reads(saved):
    ours, theirs = PlainReader(saved, 20).read_metadata(), pickle.loads((saved / METADATA).read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
