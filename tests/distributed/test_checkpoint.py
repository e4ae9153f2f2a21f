"""Checkpoints that several processes write and read together: whole or absent, and loaded by any number of them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed.worlds import ended, together
from tests.tiny import limits_of, random_examples, scorer_of, tiny_model
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import portions_of
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.plan import plan_step
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import RunFolderError, TuningforkError
from tuningfork.files import DIGESTS, is_aside
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.train import checkpoint, checkpoint_writer
from tuningfork.train.average import averaged
from tuningfork.train.batch import StepBatch
from tuningfork.train.checkpoint import Progress
from tuningfork.train.checkpointer import Checkpointer
from tuningfork.train.config import OutputConfig, TrainConfig
from tuningfork.train.optimizer import build_optimizer, move_weights
from tuningfork.train.staging import Staging
from tuningfork.train.step import train_step

EXAMPLES = random_examples([(n % 7 + 1, (2 * n % 11 + 1, 3 + n % 5)) for n in range(11)])
LAYOUTS: dict[str, dict[str, Any]] = {"FSDP": {}, "HSDP": {"replicate": 2}, "DDP": {"shard": 1}}


class Job:
    """A tiny model that is trained on the same examples again and again."""

    def __init__(self, ranks: Ranks, parallel: dict[str, Any], family: str = "llama") -> None:
        self.ranks = ranks
        self.policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
        self.layout = Layout.plan(ParallelConfig(**parallel), ranks)
        parallelize(self.policy, "none", compiled=False, layout=self.layout)
        self.scorer = scorer_of(self.policy, 64)
        self.optimizer = build_optimizer(self.policy.model, TrainConfig(learning_rate=1e-3, ema_decay=0.5))

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of some steps."""
        limits, objective, found = limits_of(512, "tree"), ObjectiveConfig(name="simpo").build(), []
        for _ in range(steps):
            plan = plan_step(portions_of(EXAMPLES, limits), limits, self.ranks.size, lambda p: p.rows)
            packs = [lay(b.examples, b.forest, b.slots) for b in plan.bins_of(self.ranks.rank)]
            batch = StepBatch.shared_out(EXAMPLES, plan.examples, packs, objective, None, self.ranks)
            step = train_step(self.scorer, objective, self.optimizer, batch, 1.0, ranks=self.ranks)
            found.append((step.loss, step.grad_norm))
        return found

    def progress(self, step: int) -> Progress:
        return Progress(step, 11 * step, "data", "model", "float32", "none", "held out", None, self.layout)

    def save(self, folder: Path, step: int) -> Path:
        return checkpoint.save(folder, self.progress(step), self.policy.model, self.optimizer, 2, None, self.ranks)

    def checkpointer(self, folder: Path, **output: Any) -> Checkpointer:
        session: Any = SimpleNamespace(policy=self.policy, ranks=self.ranks)
        held_out: Any = SimpleNamespace(best=None)
        return Checkpointer(folder, OutputConfig(**output), session, self.optimizer, held_out)

    def restore(self, path: Path) -> Progress:
        if self.policy.spread is not None:
            self.policy.spread.release()
        return checkpoint.restore(path, self.policy.model, self.optimizer, self.ranks)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, moments and averages, whole."""
        if self.policy.spread is not None:
            self.policy.spread.release()
        state = checkpoint._state(self.policy.model, self.optimizer)
        moments = {
            f"{name}.{kind}": value
            for name, of_weight in state["optimizer"]["state"].items()
            for kind, value in of_weight.items()
        }
        averages = {f"{name}.average": value for name, value in state["average"].items()}
        return {name: _whole(value) for name, value in (state["model"] | moments | averages).items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


CASES = [("FSDP", "granite"), ("HSDP", "olmo_hybrid"), ("DDP", "lfm2")]  # granite's embedding is its head
Found = tuple[dict[str, Tensor], list[tuple[float, float]], dict[str, Tensor], Layout]


def trained_and_saved(ranks: Ranks, folder: Path, cases: list[tuple[str, str]]) -> list[Found]:
    """Of each case: weights and moments after a step, as a checkpoint has them; another step, and the end."""
    found = []
    for layout, family in cases:
        job = Job(ranks, LAYOUTS[layout], family)
        job.train(1)
        job.save(folder / layout / family, 2)
        found.append((job.tensors(), job.train(1), job.tensors(), job.layout))
    return found


def gone_on(ranks: Ranks, folder: Path, cases: list[tuple[str, str]], other: str | None = None) -> list[Found]:
    """What each checkpoint gave, perhaps in another layout; a step from there, and the end."""
    found = []
    for layout, family in cases:
        job = Job(ranks, LAYOUTS[other or layout], family)
        path = checkpoint.newest(folder / layout / family, ranks)
        assert path is not None
        stood = job.restore(path)
        found.append((job.tensors(), job.train(1), job.tensors(), stood.layout))
    return found


def averaged_by_hand(ranks: Ranks, folder: Path) -> list[tuple[dict[str, Tensor], ...]]:
    """Of each layout, weight by weight, whole: behind three steps, while averages are asked for, behind that, and once
    the average is read from a checkpoint a step later. Shards of an average are those of its weight."""
    found = []
    for name in ("FSDP", "DDP"):
        job, behind = Job(ranks, LAYOUTS[name], "granite"), []
        for _ in range(3):
            job.train(1)
            behind.append(weights_of(job))
        with averaged(job.optimizer, job.policy.spread):
            within = weights_of(job)
        for weight, state in job.optimizer.state.items():
            ours, theirs = (getattr(one, "placements", None) for one in (weight, state["average"]))
            assert ours == theirs and state["average"].dtype == weight.dtype
        after, path = weights_of(job), job.save(folder / name, 3)
        job.train(1)
        if job.policy.spread is not None:
            job.policy.spread.release()
        checkpoint.restore_weights(path, job.policy.model, job.optimizer, ranks)
        found.append((*behind, within, after, weights_of(job)))
    return found


def weights_of(job: Job) -> dict[str, Tensor]:
    if job.policy.spread is not None:
        job.policy.spread.release()
    return {name: _whole(weight.detach()) for name, weight in job.policy.model.named_parameters()}


def test_averages_are_spread_as_weights_are_and_stand_in_for_them(tmp_path: Path) -> None:
    """0.25 of the weights behind the first step and of the second, and 0.5 of the third; float32 rounds each twice."""
    for first, second, third, within, after, read in together(2, averaged_by_hand, tmp_path)[0]:
        same(after, third)
        same(read, within)
        for name, weight in within.items():
            by_hand = 0.25 * first[name].double() + 0.25 * second[name].double() + 0.5 * third[name].double()
            allowed = 4 * 2**-24 * float(by_hand.abs().max())
            assert torch.allclose(weight.double(), by_hand, rtol=0, atol=allowed)
            assert not torch.equal(weight, third[name])


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """Checkpoints of all cases that four processes wrote, and what these had and did then."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, together(4, trained_and_saved, folder, CASES)[0]


def test_the_same_processes_go_on_to_the_same_bits(saved: tuple[Path, list[Found]]) -> None:
    folder, expected = saved
    for of_rank in together(4, gone_on, folder, CASES):
        for found, (tensors, steps, end, layout) in zip(of_rank, expected, strict=True):
            same(found[0], tensors)
            assert found[1] == steps and found[3] == layout
            same(found[2], end)


def test_others_load_the_same_bits_and_go_on_up_to_rounding(saved: tuple[Path, list[Found]]) -> None:
    folder, (expected, *_) = saved
    cases = CASES[:1]
    worlds = [
        [gone_on(ONE_PROCESS, folder, cases)],
        together(2, gone_on, folder, cases),
        together(3, gone_on, folder, cases, "DDP"),
    ]
    for (found,) in (of_rank for one in worlds for of_rank in one):
        same(found[0], expected[0])
        assert [loss for loss, _ in found[1]] == pytest.approx([loss for loss, _ in expected[1]], rel=1e-6)
        assert found[3] == Layout(1, 4, 1)


def test_several_go_on_from_one(tmp_path: Path) -> None:
    ((tensors, *_),) = trained_and_saved(ONE_PROCESS, tmp_path, CASES[:1])
    for ((found, *_),) in together(3, gone_on, tmp_path, CASES[:1]):  # 97, 32 and 64 rows: no equal shares
        same(found, tensors)


def each_reads(ranks: Ranks, path: Path) -> tuple[set[str], int]:
    """Of which files this rank reads pieces, and how many bytes of tensors."""
    files, read = set(), 0
    slice_file = FileSystemReader._slice_file

    def counting(self: FileSystemReader, file: Any, place: Any) -> Any:
        nonlocal read
        files.add(place.relative_path)
        read += place.length
        return slice_file(self, file, place)

    FileSystemReader._slice_file = counting  # type: ignore[method-assign]
    try:
        Job(ranks, {}, "granite").restore(path)
    finally:
        FileSystemReader._slice_file = slice_file  # type: ignore[method-assign]
    return files, read


def test_each_reads_its_own_shards(saved: tuple[Path, list[Found]]) -> None:
    """And what all have, such as norms, which lies in some of the files."""
    path = saved[0] / "FSDP" / "granite" / "step-2"
    in_all = sum(file.stat().st_size for file in path.glob("*.distcp"))
    small = in_all // 5  # of a model so small, norms and what stands around each tensor are some of it
    for _, read in together(4, each_reads, path):
        assert in_all // 4 <= read + small // 4 and read <= in_all // 4 + small
    _, alone = each_reads(ONE_PROCESS, path)
    assert alone == in_all


class Full:
    """A disk that is full, for one rank and where it writes something."""

    def __init__(self, ranks: Ranks, failing: int, place: str) -> None:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        owner, name = {
            "its shards": (checkpoint_writer.HashedFiles, "create_stream"),
            "the folder": (Path, "mkdir"),
            "progress": (Path, "write_text"),
            "the checksums": (checkpoint_writer, "seal"),
            "the name": (os, "rename"),
        }[place]
        self.owner, self.name, self.real = owner, name, getattr(owner, name)
        if ranks.rank == failing:
            setattr(owner, name, refuse)

    def make_room(self) -> None:
        setattr(self.owner, self.name, self.real)


PLACES = [(2, "its shards"), *((0, place) for place in ("its shards", "the folder", "progress", "the name"))]


def fill_up(ranks: Ranks, folder: Path) -> list[tuple[str, str]]:
    """What this rank gets where one finds its disk full, at each place in turn; a save with room ends it."""
    job, found = Job(ranks, {}), []
    job.train(1)
    job.save(folder, 1)
    for failing, place in PLACES:
        full = Full(ranks, failing, place)
        try:
            job.save(folder, 2)
        except TuningforkError as error:
            found.append((type(error).__name__, str(error)))
        finally:
            full.make_room()
        assert checkpoint.newest(folder, ranks) == folder / "step-1"
        ranks.barrier()
        assert [path.name for path in folder.iterdir()] == ["step-1"]
        ranks.barrier()
    job.save(folder, 2)
    job.restore(folder / "step-2")
    return found


def test_a_disk_that_is_full_for_one_is_said_by_that_one(tmp_path: Path) -> None:
    outcomes = together(3, fill_up, tmp_path)
    for number, (failing, place) in enumerate(PLACES):
        for rank, outcome in enumerate(outcomes):
            kind, said = outcome[number]
            assert kind == ("RunFolderError" if rank == failing else "SaidElsewhere"), (place, said)
            if rank == failing:
                assert f"{tmp_path}/step-2 cannot be written: No space left on device" in said


def stage_and_write(ranks: Ranks, folder: Path) -> tuple[bool, list[tuple[str, str]]]:
    """Save in step, and beside the next steps; then find the disk full beside them."""
    job, found = Job(ranks, {}), []
    checkpointer = job.checkpointer(folder / "beside")
    for step in (1, 2):
        job.train(1)
        checkpointer.save(job.progress(step))
        job.save(folder / "in step", step)
    job.train(1)  # moves the weights while they are written
    checkpointer.prune()  # waits
    full = Full(ranks, 1, "its shards")
    checkpointer.save(job.progress(3))
    while not ranks.any(checkpointer.failed):
        pass
    full.make_room()
    for act in (lambda: checkpointer.save(job.progress(3)), lambda: checkpointer.save(job.progress(4))):
        try:
            with checkpointer:
                act()
        except TuningforkError as error:
            found.append((type(error).__name__, str(error)))
    return checkpointer.failed, found


def test_what_is_written_beside_the_steps_is_the_same_to_the_bit(tmp_path: Path) -> None:
    outcomes = together(3, stage_and_write, tmp_path)
    beside, in_step = tmp_path / "beside", tmp_path / "in step"
    names = {path.name for path in (in_step / "step-2").iterdir()}
    assert {path.name for path in (beside / "step-2").iterdir()} == names >= {"__2_0.distcp", "progress.json"}
    for name in names - {".metadata", DIGESTS}:  # which say when and where it was written
        assert (beside / "step-2" / name).read_bytes() == (in_step / "step-2" / name).read_bytes(), name
    # The failure is told by the next to ask, once; what comes then is written.
    kinds = [[kind for kind, _ in found] for _, found in outcomes]
    assert kinds == [["SaidElsewhere"], ["RunFolderError"], ["SaidElsewhere"]]
    assert "step-3 cannot be written: No space left on device" in outcomes[1][1][0][1]
    assert {path.name for path in beside.iterdir()} == {"step-2", "step-4"}


def test_one_process_may_write_beside_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does meanwhile is in no file; Ctrl-C, as any end, waits for it."""
    job, go_on = Job(ONE_PROCESS, {}), threading.Event()
    seal = checkpoint_writer.seal
    monkeypatch.setattr(checkpoint_writer, "seal", lambda *args: (go_on.wait(60), seal(*args)))
    with job.checkpointer(tmp_path, save_async=True) as checkpointer:
        job.train(1)
        expected = job.tensors()
        checkpointer.save(job.progress(1))
        job.train(1)
        assert not (tmp_path / "step-1").exists()
        go_on.set()
    job.restore(tmp_path / "step-1")
    same(job.tensors(), expected)


def in_8_bits(ranks: Ranks, folder: Path, weights: torch.dtype, restored: bool, steps: int) -> tuple[str, Tensor]:
    """A matrix in `weights` that is moved by moments in 8 bits: how these lie, and this process's rows in the end."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False, dtype=weights)
    layout = Layout.plan(ParallelConfig(), ranks)
    mesh = layout.mesh("cpu")["shard"]
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, TrainConfig(optimizer="adamw_8bit", learning_rate=1e-3))
    if restored:
        checkpoint.restore(folder / "step-1", model, optimizer, ranks)
    weight: Any = model.weight
    for step in range(1 + restored, 1 + steps):
        torch.manual_seed(step)
        weight.grad = distribute_tensor(torch.randn(128, 64, dtype=weights), mesh)
        move_weights(optimizer)
        if step == 1:
            weight.grad = None
            progress = Progress(1, 1, "data", "model", "float32", "none", "held out", None, layout)
            work = checkpoint.saving(folder, progress, model, optimizer, 2, None, ranks, Staging())
        if step == 2 and not restored:
            work()  # what was to be saved is the state before this step
    return type(optimizer.state[weight]["exp_avg"].to_local()).__name__, weight.to_local().detach()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])  # the latter are rounded by chance
def test_8_bit_moments_of_spread_weights_go_on_to_the_bit(tmp_path: Path, weights: torch.dtype) -> None:
    whole, resumed = (together(2, in_8_bits, tmp_path, weights, restored, 3) for restored in (False, True))
    for (kind, expected), (again, found) in zip(whole, resumed, strict=True):
        assert kind == again == "OptimState8bit"
        assert found.dtype == weights and torch.equal(found, expected)


def die_while_saving(ranks: Ranks, folder: Path, dying: int) -> None:
    job = Job(ranks, {})
    job.train(1)
    job.save(folder, 1)
    if ranks.rank == dying:

        def die(self: object, path: Path, mode: str) -> None:
            path.write_text("half of it")
            os._exit(9)

        checkpoint_writer.HashedFiles.create_stream = die  # type: ignore[assignment,method-assign]
    job.save(folder, 2)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_kill_leaves_the_older_one_the_newest(tmp_path: Path, dying: int) -> None:
    outcomes = ended(3, die_while_saving, tmp_path, dying)
    for rank, (well, why) in enumerate(outcomes):
        assert not well and ("died" in why if rank == dying else "RankError" in why), why
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"step-1"} and all(map(is_aside, left - {"step-1"}))
    assert checkpoint.newest(tmp_path) == tmp_path / "step-1"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def damaged(ranks: Ranks, path: Path) -> str:
    with pytest.raises(TuningforkError) as caught:
        Job(ranks, {}, "granite").restore(path)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_flipped_bit_is_said_once(saved: tuple[Path, list[Found]], tmp_path: Path) -> None:
    """Each of the processes hashes some of the files."""
    path = Path(shutil.copytree(saved[0] / "FSDP" / "granite" / "step-2", tmp_path / "step-2"))
    content = bytearray((path / "__2_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__2_0.distcp").write_bytes(content)
    said = together(2, damaged, path)
    assert sorted(line.partition(":")[0] for line in said) == ["RunFolderError", "SaidElsewhere"]
    (line,) = (line for line in said if line.startswith("RunFolderError"))
    assert "__2_0.distcp is damaged" in line and "Remove that folder" in line


def not_a_number(ranks: Ranks, folder: Path) -> str:
    job = Job(ranks, {})
    if ranks.rank == 1:
        weight: Any = job.policy.model.get_input_embeddings().weight
        with torch.no_grad():
            weight.to_local()[0, 0] = torch.nan
    with pytest.raises(TuningforkError) as caught:
        job.checkpointer(folder).save(job.progress(1))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_weight_that_is_no_number_on_one_is_saved_by_none(tmp_path: Path) -> None:
    said = together(3, not_a_number, tmp_path)
    assert said[1].startswith("NonFiniteError: step 1: the step moved model.embed_tokens.weight to nan or infinity")
    assert [line.partition(":")[0] for line in said] == ["SaidElsewhere", "NonFiniteError", "SaidElsewhere"]
    assert not list(tmp_path.iterdir())


def fail_alone(ranks: Ranks) -> None:
    with ranks.agreeing():
        if ranks.rank == 1:
            raise RunFolderError("the disk is full")


def test_one_voice() -> None:
    """Whichever process comes first to the end of the world, it is the one that failed that speaks."""
    for rank, (well, why) in enumerate(ended(3, fail_alone)):
        said = why.strip().splitlines()[-1].removeprefix("tuningfork.errors.")
        assert not well and said == ("RunFolderError: rank 1: the disk is full" if rank == 1 else "SaidElsewhere")
