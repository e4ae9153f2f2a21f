"""Weights on several processes: hashed, read and exported as if one process had them, each with its own part."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.distributed.worlds import together
from tests.models.hf.folders import folder_of, plain_load, rewrite
from tests.models.hf.released_folders import RELEASED, forms
from tests.repeated import slow
from tests.tiny import random_examples, tiny_model
from tuningfork.data.packing.layout import build_pack
from tuningfork.distributed import export, rows, tensor
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.export import save
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.load import WHOLE, load_split, load_spread, replace_spread
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.tensor import local
from tuningfork.errors import ModelError, RunFolderError
from tuningfork.models.hf import attention, digests, safetensors_reader
from tuningfork.models.hf.load import Loaded, load
from tuningfork.models.policy import Policy
from tuningfork.recipe.run_config import RunConfig
from tuningfork.reference.code import model_code_digest
from tuningfork.report.run.console import Console
from tuningfork.train.setup.model import start_model
from tuningfork.train.setup.reference import starting_weights

# Bytes: what each thread that reads has for it, and whatever is allocated once.
READERS = safetensors_reader._THREADS * safetensors_reader._PIECE + (32 << 20)
LAYOUTS = {"FSDP": {"shard": None}, "HSDP": {"replicate": 2}, "DDP": {"shard": 1}}
LAYOUTS_OF_DIGESTS = {**LAYOUTS, "TP": {"shard": 1, "tensor": 2}}


def spread(ranks: Ranks, model: Any, parallel: dict[str, Any]) -> Policy:
    policy = Policy.plain(model, torch.float32)
    parallelize(policy, "none", compiled=False, layout=Layout.plan(ParallelConfig(**parallel), ranks))
    return policy


def digests_of(ranks: Ranks, family: str, parallel: dict[str, Any]) -> list[str]:
    """Before and after a matrix, and then a norm, has changed; and of the model's code."""
    policy = spread(ranks, tiny_model(family, torch.float32), parallel)
    found = [starting_weights(policy, Console(), ranks)]
    for name in ("mlp.down_proj.weight", "input_layernorm.weight"):
        [weight] = [w for n, w in policy.model.named_parameters() if n.endswith("layers.1." + name)]
        weight.data.mul_(1.5)
        found.append(starting_weights(policy, Console(), ranks))
    return [*found, model_code_digest(policy.model), policy.config_digest()]


@pytest.mark.parametrize(
    ("layout", "size"), [("FSDP", 2), ("FSDP", 3), ("HSDP", 4), ("DDP", 2), ("TP", 4)]
)  # 3: uneven rows
@pytest.mark.parametrize("family", ["qwen2", "granite"])  # untied, with biases; tied
def test_a_model_has_one_digest_however_it_is_spread(size: int, layout: str, family: str) -> None:
    expected = digests_of(ONE_PROCESS, family, {})
    assert len({*expected}) == 5
    for found in together(size, digests_of, family, LAYOUTS_OF_DIGESTS[layout]):
        assert found == expected


# --- export -----------------------------------------------------------------------------------------------------------


DTYPES = {"as trained": None, "bfloat16": torch.bfloat16}  # of an export; a model is read and spread once for both


def exports(ranks: Ranks, path: Path, original: Path, parallel: dict[str, Any]) -> None:
    """Folders of DTYPES in `path`, of weights other than the original's."""
    loaded = load(str(original))
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(1.25)
    policy = spread(ranks, loaded.model, parallel)
    for name, dtype in DTYPES.items():
        save(replace(loaded, model=policy.model), ranks, path / name, dtype)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("family", "layout"),  # untied, tied, tied and with other norms
    [
        pair if pair in {("llama", "FSDP"), ("granite", "HSDP"), ("gemma3", "DDP")} else slow(*pair)
        for pair in product(["llama", "granite", "gemma3"], LAYOUTS)
    ],
)
def test_an_export_of_four_processes_is_that_of_one_to_the_byte(tmp_path, layout, family) -> None:
    original = folder_of(tmp_path / "original", family)
    exports(ONE_PROCESS, tmp_path / "one", original, {})
    together(4, exports, tmp_path / "four", original, LAYOUTS[layout])
    assert contents(tmp_path / "four") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["four", "one", "original"]
    assert sorted(path.name for path in (tmp_path / "four").iterdir()) == sorted(DTYPES)


@pytest.mark.parametrize("name", ["olmo_hybrid with old names", "qwen3_5 with tied weights"])
def test_an_export_of_a_released_hybrid_model_is_that_of_one_process_to_the_byte(tmp_path, name) -> None:
    original = RELEASED[name](tmp_path / "original")
    exports(ONE_PROCESS, tmp_path / "one", original, {})
    together(2, exports, tmp_path / "two", original, {})
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    for dtype in DTYPES:
        assert forms(tmp_path / "two" / dtype).keys() == forms(original).keys()


def in_small_files(ranks: Ranks, *args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "FILE", 20_000)
        exports(ranks, *args)


def test_files_are_shared_out_among_processes_and_any_reader_reads_them(tmp_path) -> None:
    original = folder_of(tmp_path / "original")
    exports(ONE_PROCESS, tmp_path / "one", original, {})
    together(2, in_small_files, tmp_path / "two", original, {})
    one, two = (tmp_path / name / "as trained" for name in ("one", "two"))
    assert len([file for file in contents(two) if file.endswith(".safetensors")]) > 5
    digests.check_export(str(two), weights=True)
    digests.check_export(str(two), weights=False)
    one, two = (plain_load(folder).state_dict() for folder in (one, two))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def without_room(ranks: Ranks, path: Path, original: Path) -> str:
    """The second rank's disk is full when its first tensor comes; what each of them says of it."""

    def full(of: Path, forms: Any) -> Any:
        yield
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(export, "written", full)
        try:
            in_small_files(ranks, path, original, {})
        except RunFolderError as error:
            return str(error)
    return "no error"


def test_where_one_cannot_write_all_are_told_and_nothing_is_left(tmp_path) -> None:
    original = folder_of(tmp_path / "original")
    (tmp_path / "models").mkdir()
    [said, *others] = together(3, without_room, tmp_path / "models", original)
    assert "models/as trained cannot be written: No space left on device." in said and others == [said, said]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "original"]
    assert not [*(tmp_path / "models").iterdir()]


def memory_of_an_export(ranks: Ranks, path: Path) -> tuple[int, int]:
    """Bytes that the process has at the peak of an export beyond those before, and of the largest tensor."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is let go of is the system's again
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model._weight_conversions = []  # as of one that was loaded
    policy = spread(ranks, model, {})
    loaded = Loaded(policy.model, torch.float32)
    save(loaded, ranks, path / "first")  # whatever is allocated once
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = resident("VmHWM")
    # Pieces as small beside a tensor as they are beside those of a large model, and a file for each process.
    with patch.object(rows, "PIECE", 1 << 20), patch.object(export, "FILE", 1 << 25):
        save(loaded, ranks, path / "second")
    return resident("VmHWM") - before, max(weight.nbytes for weight in model.parameters())


def resident(which: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(which)))


def test_an_export_takes_less_than_two_tensors_of_memory(tmp_path) -> None:
    for taken, largest in together(4, memory_of_an_export, tmp_path):
        assert taken < 2 * largest  # of 14 such


# --- loading ----------------------------------------------------------------------------------------------------------


def read_by_each(ranks: Ranks, path: Path, parallel: dict[str, Any], dtype: torch.dtype) -> Any:
    """A spread model's digest, its whole weights, and the bytes that this process read."""
    count: list[int] = []
    layout = Layout.plan(ParallelConfig(**parallel), ranks)
    device = torch.device("cpu")
    loaded, sharding = load_spread(
        str(path), device, dtype, layout, torch.float32, lambda done, total: count.append(total)
    )
    policy = Policy.plain(loaded.model, torch.float32, sharding)
    batch = a_pack()
    with torch.no_grad():
        hidden = policy.hidden_rows(batch)
    digest = starting_weights(policy, Console(), ranks)
    tied = policy.head_weight is policy.model.get_input_embeddings().weight
    return digest, hidden, tied, loaded.dtypes, loaded.notes, count[-1] if count else 0


def a_pack() -> Any:
    examples = random_examples([(5, (3, 4)), (2, (6,))])
    return build_pack(examples, 64, "tree")


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma3", "phi"])
def test_each_process_reads_its_own_rows_and_all_have_the_model_of_one(tmp_path, size, family, dtype) -> None:
    path = folder_of(tmp_path / "original", family)
    alone = Policy.plain(load(str(path), dtype=dtype).model, torch.float32)
    with torch.no_grad():
        hidden = alone.hidden_rows(a_pack())
    expected = starting_weights(alone, Console())
    matrices = sum(w.numel() * 4 for w in alone.model.parameters() if w.ndim > 1)
    others = sum(w.numel() * 4 for w in alone.model.parameters() if w.ndim < 2)
    found = together(size, read_by_each, path, {}, dtype)
    for digest, numbers, tied, dtypes, notes, _ in found:
        assert digest == expected
        assert torch.equal(numbers, hidden)
        assert tied == (alone.head_weight is alone.model.get_input_embeddings().weight)
        assert dtypes.keys() and not notes
    assert sum(one[-1] for one in found) == matrices + size * others


@pytest.mark.parametrize("name", RELEASED)
def test_each_process_reads_its_own_rows_of_a_released_hybrid_model(tmp_path, name) -> None:
    """Also where a tensor lies in parts, of which a process's rows are some of one and some of another."""
    path = RELEASED[name](tmp_path)
    alone = Policy.plain(load(str(path)).model, torch.float32)
    with torch.no_grad():
        hidden = alone.hidden_rows(a_pack())
    expected = starting_weights(alone, Console())
    for digest, numbers, _, dtypes, notes, _ in together(3, read_by_each, path, {}, torch.float32):
        assert digest == expected and torch.equal(numbers, hidden)
        assert dtypes.keys() and WHOLE not in notes


SPLIT = [(2, {"tensor": 2}), (4, {"tensor": 2}), (4, {"tensor": 2, "shard": 1})]  # 2, 2 x 2 spread, 2 x 2 copies


def read_in_parts(ranks: Ranks, path: Path, parallel: dict[str, Any], dtype: torch.dtype) -> Any:
    """Of a model that is split when it is read: its digest, the bytes that this process read and keeps, what a token
    costs; whether its numbers are those of one that is split when it has been read."""
    count: list[int] = []
    layout = Layout.plan(ParallelConfig(**parallel), ranks)
    loaded, policy = load_split(
        str(path), torch.device("cpu"), dtype, layout, torch.float32, lambda done, total: count.append(total)
    )
    kept = sum(weight.nbytes for weight in map(local, policy.model.parameters()))
    other = spread(ranks, load(str(path), dtype=dtype).model, parallel)
    with torch.no_grad():
        same = torch.equal(policy.hidden_rows(a_pack()), other.hidden_rows(a_pack()))
    assert policy.spread is not None and not loaded.notes
    assert (policy.head_weight is policy.model.get_input_embeddings().weight) == policy.config.tie_word_embeddings
    return starting_weights(policy, Console(), ranks), count[-1], kept, policy.flops(), same


@pytest.mark.parametrize(("size", "parallel"), SPLIT)
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", torch.float32), ("granite", torch.bfloat16)])
def test_a_model_is_split_before_it_is_read(tmp_path, size, parallel, family, dtype) -> None:
    """To the bit it is the one that is read and then split. Of a matrix that is split by its columns rows are read
    whole, some at a time; nothing else is read that is not kept."""
    path = folder_of(tmp_path / "original", family)
    alone = Policy.plain(load(str(path), dtype=dtype).model, torch.float32)
    digest, stored = starting_weights(alone, Console()), load_file(path / "model.safetensors")
    copies = 2 if parallel.get("shard") == 1 else 1
    expected = 0
    for name, there in stored.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            expected += there.nbytes * 2 * copies
        elif there.ndim > 1:
            expected += there.nbytes * copies
        else:  # biases are split, norms are not
            expected += there.nbytes * (size // 2 if name.endswith(".bias") else size)
    found = together(size, read_in_parts, path, parallel, dtype)
    assert sum(read for _, read, *_ in found) == expected
    parts = size // copies
    for own, _, kept, flops, same in found:
        assert own == digest and flops == alone.flops() and same
        few = sum(weight.nbytes for weight in alone.model.parameters() if weight.ndim == 1)
        whole = sum(weight.nbytes for weight in alone.model.parameters() if weight.ndim > 1)
        assert kept <= whole / parts * 1.05 + few  # a vocabulary of 97 has no even parts


def started(ranks: Ranks, path: Path, weights: str, share: str, parallel: dict[str, Any] | None = None) -> Any:
    """A session as a run starts it, its blocks compiled as far as their check goes."""
    config = RunConfig()
    for name, count in (parallel or {}).items():
        setattr(config.parallel, name, count)
    config.model.path, config.model.weights, config.pack.share = str(path), weights, share
    config.train.device, config.train.activation_memory = "cpu", "none"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "has_plain_kernels", False)  # so that they are checked
        if ranks.size > 1:  # nobody reads the whole model
            patch.setattr("tuningfork.train.setup.model.load", None)
            patch.setattr("tuningfork.distributed.load.load", None)
        session = start_model(config, torch.device("cpu"), Console(), ranks)
    digest = starting_weights(session.policy, Console(), ranks)
    sizes = {n: tuple(s.shape) for n, s in session.check.exact.d_weights.items()}
    return digest, {n: w.dtype for n, w in session.policy.model.named_parameters()}, sizes


@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "float32"), slow("granite", "bfloat16"), ("olmo_hybrid", "bfloat16")]
)
def test_a_run_starts_with_the_weights_of_one_process_and_every_check(tmp_path, family, weights) -> None:
    path = folder_of(tmp_path / "original", family)
    digest, dtypes, sizes = started(ONE_PROCESS, path, weights, "tree")
    for found in together(2, started, path, weights, "tree"):
        assert found[:2] == (digest, dtypes)
        assert found[2].keys() == sizes.keys()  # a gradient has reached every weight
    if family == "olmo_hybrid":
        assert {kind for name, kind in dtypes.items() if name.endswith(("A_log", "dt_bias"))} == {torch.float32}


@pytest.mark.parametrize(("size", "parallel"), SPLIT[1:])
def test_a_run_whose_products_are_computed_together_starts_so_too(tmp_path, size, parallel) -> None:
    path = folder_of(tmp_path / "original", "qwen2")
    digest, dtypes, sizes = started(ONE_PROCESS, path, "bfloat16", "tree")
    for found in together(size, started, path, "bfloat16", "tree", parallel):
        assert found[:2] == (digest, dtypes)
        assert found[2].keys() == sizes.keys()


def started_with_a_fault(ranks: Ranks, path: Path) -> str:
    """What a start says of products that are put together wrongly, by a hundredth."""

    def by_rows(module: Any, rows: torch.Tensor) -> torch.Tensor:
        products: torch.Tensor = module.tensor_group.summed(torch.nn.functional.linear(rows, local(module.weight)))
        return products * 1.01

    with patch.dict(tensor._STYLES, {"rowwise": tensor._STYLES["rowwise"]._replace(forward=by_rows)}):
        try:
            started(ranks, path, "float32", "tree", {"tensor": 2})
        except ModelError as error:
            return str(error)
    return "no error"


def test_a_model_that_is_split_wrongly_does_not_start(tmp_path) -> None:
    """Its parts are held against the unsplit model, which no process has whole."""
    path = folder_of(tmp_path / "original", "llama")
    for said in together(2, started_with_a_fault, path):
        assert "hidden states are" in said and "away from those of plain kernels" in said


def replaced(ranks: Ranks, path: Path, other: Path) -> str:
    """The digest of a model that has taken the weights of another."""
    layout = Layout.plan(ParallelConfig(), ranks)
    loaded, sharding = load_spread(str(path), torch.device("cpu"), torch.float32, layout, torch.float32)
    policy = Policy.plain(loaded.model, torch.float32, sharding)
    with torch.no_grad():
        policy.hidden_rows(a_pack())
    sharding.release()
    replace_spread(loaded.model, str(other))
    with torch.no_grad():
        policy.hidden_rows(a_pack())
    return starting_weights(policy, Console(), ranks)


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_of_another_folder_take_their_place(tmp_path, family, pickled) -> None:
    path, other = folder_of(tmp_path / "original", family), folder_of(tmp_path / "other", family)
    rewrite(other, lambda tensors: [tensor.mul_(1.25) for tensor in tensors.values()])
    alone = Policy.plain(load(str(other)).model, torch.float32)
    if pickled:
        as_pickle(other)
    assert together(3, replaced, path, other) == [starting_weights(alone, Console())] * 3


def replaced_in_parts(ranks: Ranks, path: Path, other: Path) -> str:
    """The same of a model whose products several processes compute together."""
    policy = spread(ranks, load(str(path)).model, {"tensor": 2})
    assert policy.spread is not None
    policy.spread.release()
    replace_spread(policy.model, str(other))
    return starting_weights(policy, Console(), ranks)


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("granite", 4)])  # 4: parts of rows, of which each has some
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_of_another_folder_take_their_place_in_parts_of_rows(tmp_path, family, size, pickled) -> None:
    path, other = folder_of(tmp_path / "original", family), folder_of(tmp_path / "other", family)
    rewrite(other, lambda tensors: [tensor.mul_(1.25) for tensor in tensors.values()])
    alone = Policy.plain(load(str(other)).model, torch.float32)
    if pickled:
        as_pickle(other)
    assert together(size, replaced_in_parts, path, other) == [starting_weights(alone, Console())] * size


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_older_files_are_read_whole_by_each_process_with_a_word_on_it(tmp_path, family) -> None:
    path = folder_of(tmp_path / "original", family)
    expected = starting_weights(Policy.plain(load(str(path)).model, torch.float32), Console())
    as_pickle(path)
    for digest, *_, notes, _ in together(2, read_by_each, path, {}, torch.float32):
        assert digest == expected and notes == (WHOLE,)


def spoilt(ranks: Ranks, path: Path) -> str:
    layout = Layout.plan(ParallelConfig(), ranks)
    try:
        load_spread(str(path), torch.device("cpu"), torch.float32, layout, torch.float32)
    except ModelError as error:
        return str(error)
    return "no error"


def test_a_weight_that_is_no_number_is_found_by_the_process_that_has_it(tmp_path) -> None:
    path = folder_of(tmp_path / "original")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][-1, 3] = torch.nan

    rewrite(path, spoil)
    first, second = together(2, spoilt, path)
    assert first == "no error" and "NaN or infinite weights in 1 tensors, first model.layers.2.mlp.up_proj" in second


def memory_of_loading(ranks: Ranks, path: Path, parallel: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a process takes at the peak of loading, beyond the ones that it keeps; and those that it keeps."""
    layout = Layout.plan(ParallelConfig(**parallel), ranks)
    read = load_spread if layout.tensor == 1 else load_split
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is let go of is the system's again
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = resident("VmHWM")
    loaded, _ = read(str(path), torch.device("cpu"), torch.float32, layout, torch.float32)
    kept = sum(w.to_local().nbytes if isinstance(w, DTensor) else w.nbytes for w in loaded.model.parameters())
    return resident("VmHWM") - before - kept, kept


def write_model(ranks: Ranks, path: Path) -> int:
    """A model with large matrices in a folder; its bytes."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(weight.nbytes for weight in model.parameters())


def test_no_process_ever_has_the_whole_model(tmp_path) -> None:
    [size] = together(1, write_model, tmp_path)  # by a process that keeps what it has let go of to itself
    for parallel in ({}, {"tensor": 2}):
        for beyond, kept in together(4, memory_of_loading, tmp_path, parallel):
            assert size / 4 <= kept < size / 4 * 1.01
            assert beyond < READERS < size / 2  # and is the same for a model of any size
