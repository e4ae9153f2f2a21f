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
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from tests.bounds import within
from tests.payload import Payload
from tests.train.test_checkpoint import PROGRESS, parts
from tuningfork.errors import RunFolderError
from tuningfork.files import DIGESTS, seal
from tuningfork.train.checkpoint import restore, save
from tuningfork.train.checkpoint_reader import METADATA, PlainReader

DATA = "__0_0.distcp"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once a payload has been run."""
    return tmp_path / "ran"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", PROGRESS, *parts(), keep_last=2)


def refused(path: Path, why: str) -> str:
    """What is said of a checkpoint whose checksums are right, as those of whoever made it are."""
    (path / DIGESTS).unlink()
    seal(path)
    model, optimizer = parts()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(RunFolderError, match=why) as caught:
        restore(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    message = str(caught.value)
    assert str(path) in message and "begin a new one in another output.dir" in message and "\n" not in message
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


def test_a_program_in_place_of_a_plain_value(tmp_path, ran):
    model, optimizer = parts()
    optimizer.param_groups[0]["foreach"] = Payload(ran)
    path = save(tmp_path / "checkpoints", PROGRESS, model, optimizer, keep_last=2)
    assert "Nothing of it was run" in refused(path, r"it calls for 'posix\.mkdir'")
    assert not ran.exists()


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
    ours, theirs = PlainReader(saved).read_metadata(), pickle.loads((saved / METADATA).read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
