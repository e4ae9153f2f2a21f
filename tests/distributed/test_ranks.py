"""Ranks: one process has everything and agrees with itself; several tell each other what they have."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.worlds import ended, together
from tests.tiny import tiny_policy
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.world import _check_own_gpus, _first_to_fail, world
from tuningfork.errors import ConfigError, RankError


def test_one_process_is_all_there_is() -> None:
    values = torch.tensor([1.5], dtype=torch.float64)
    assert ONE_PROCESS.first and [places.tolist() for places in ONE_PROCESS.dealt(3)] == [[0, 1, 2]]
    assert ONE_PROCESS.any(True) and not ONE_PROCESS.any(False)
    assert ONE_PROCESS.gather(values, [1])[0] is values and ONE_PROCESS.all("x") == ["x"]
    assert ONE_PROCESS.from_first(7) == 7
    assert list(ONE_PROCESS.in_step([1, 2], lambda: pytest.fail("nobody has more"))) == [1, 2]
    ONE_PROCESS.barrier()
    with ONE_PROCESS.first_of_each_node():
        pass


def test_a_tensor_group_is_one_worker() -> None:
    ranks = [Ranks(rank, 6, tensor=2) for rank in range(6)]
    assert [one.worker for one in ranks] == [0, 0, 1, 1, 2, 2] and ranks[0].workers == 3
    assert [one.speaks for one in ranks] == [True, False] * 3
    assert [places.tolist() for places in ranks[1].dealt(7)] == [[0, 1, 2], [3, 4, 5], [6]]


def _count(ranks: Ranks) -> object:
    ranks = replace(ranks, tensor=2)
    own = torch.full((ranks.worker + 1,), ranks.worker, dtype=torch.float64)
    return ranks.total(ranks.worker + 1), [part.tolist() for part in ranks.of_workers(own, [1, 2])]


def test_what_workers_have_is_counted_once() -> None:
    assert together(4, _count) == [(3, [[0.0], [1.0, 1.0]])] * 4


def _talk(ranks: Ranks) -> object:
    own = torch.arange(ranks.rank, dtype=torch.float64) + 10 * ranks.rank
    order = []
    with ranks.first_of_each_node():
        order.append(ranks.from_first("said") if ranks.size == 1 else "here")
    return (
        ranks.first,
        ranks.any(ranks.rank == 2),
        ranks.any(False),
        ranks.all(f"rank {ranks.rank}"),
        ranks.from_first(f"rank {ranks.rank}"),
        [part.tolist() for part in ranks.gather(own, [*range(ranks.size)])],
        [places.tolist() for places in ranks.dealt(7)],
        list(ranks.in_step([ranks.rank] * ranks.rank, lambda: -1)),
    )


def test_several_tell_each_other_what_they_have() -> None:
    found = together(3, _talk)
    assert [first for first, *_ in found] == [True, False, False]
    for rank, (_, some, none, all_have, from_first, gathered, dealt, in_step) in enumerate(found):
        assert some and not none
        assert all_have == ["rank 0", "rank 1", "rank 2"] and from_first == "rank 0"
        assert gathered == [[], [10.0], [20.0, 21.0]]
        assert dealt == [[0, 1, 2], [3, 4, 5], [6]]
        assert in_step == [rank] * rank + [-1] * (2 - rank)


def _left_alone(ranks: Ranks) -> str:
    if ranks.rank == 1:
        os._exit(9)  # as kill -9 does
    with pytest.raises(RankError, match="continue with --resume") as caught:
        ranks.barrier()
    return str(caught.value)


def test_a_rank_that_has_died_is_no_hang() -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        together(2, _left_alone)


def _left_alone_in_a_pass(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os._exit(9)
    for _ in range(2):  # the first may be on its way before the other has ended
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_has_died_is_no_bug_where_others_exchange_tensors() -> None:
    """FSDP does so by itself, within the model's passes; the error that comes out there is the user's to read."""
    [(done, said), (_, other)] = ended(2, _left_alone_in_a_pass)
    assert other == "rank 1 died"
    assert not done and "errors.RankError: another process of the run has ended" in said.splitlines()[-1]


def _broken(ranks: Ranks) -> None:
    raise RuntimeError("a bug")


def test_a_bug_stays_a_bug() -> None:
    last = sorted(said.splitlines()[-1] for _, said in ended(2, _broken))
    assert last[0] == "RuntimeError: a bug" and last[1].startswith("tuningfork.errors.SaidElsewhere")


class _Hangs(dist.Store):
    """A store whose process has stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.ended.wait()
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_does_not_answer_silences_nobody() -> None:
    """The process that keeps it may hang, and is what the others have to speak of; one that has ended has spoken."""
    store = _Hangs()
    assert _first_to_fail(store, 0.01)
    store.ended.set()
    assert not _first_to_fail(store, 10.0)
    assert _first_to_fail(store, 10.0, far=True), "nobody on this machine has read what was said on that one"
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    assert [_first_to_fail(store, 10.0) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("asked", "size", "per_node", "layout"),
    [
        ({}, 1, 1, Layout(1, 1, 1)),
        ({"shard": 8}, 1, 1, Layout(1, 1, 1)),
        ({}, 8, 8, Layout(1, 8, 1)),
        ({}, 32, 8, Layout(4, 8, 1)),
        ({"tensor": 2}, 32, 8, Layout(4, 4, 2)),
        ({"shard": 32}, 32, 8, Layout(1, 32, 1)),
        ({"replicate": 4}, 4, 4, Layout(4, 1, 1)),
        ({"replicate": 2}, 4, 4, Layout(2, 2, 1)),
        ({"shard": 1}, 4, 4, Layout(4, 1, 1)),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 8, 8, Layout(2, 2, 2)),
    ],
)
def test_layouts(asked: dict, size: int, per_node: int, layout: Layout) -> None:
    assert Layout.plan(ParallelConfig(**asked), Ranks(0, size, 0, per_node)) == layout


@pytest.mark.parametrize("asked", [{"replicate": 3}, {"tensor": 3}, {"replicate": 2, "shard": 4}, {"shard": 8}])
def test_what_does_not_share_out_the_processes_is_refused(asked: dict) -> None:
    with pytest.raises(ConfigError, match="must be 4") as caught:
        Layout.plan(ParallelConfig(**asked), Ranks(0, 4, 0, 4))
    assert all(f"parallel.{name} {value}" in str(caught.value) for name, value in asked.items())
    assert "None" not in str(caught.value), "a recipe spells it null"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started several"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started several"),
        ({"WORLD_SIZE": "two"}, "no number"),
    ],
)
def test_a_launcher_that_does_not_say_where_the_others_are(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words), world(ParallelConfig(), cuda=False):
        pass


def test_without_a_launcher_there_is_one_process() -> None:
    with world(ParallelConfig(), cuda=False) as ranks:
        assert ranks is ONE_PROCESS
    assert not dist.is_initialized()


def test_a_policy_is_made_ready_in_one_place() -> None:
    policy = tiny_policy()
    parallelize(policy, "block", compiled=False)
    assert policy.activation_memory == "block" and not policy.compiled and policy.spread is None
    parallelize(policy, "none", compiled=True)
    assert policy.activation_memory == "none" and policy.compiled


def test_two_ranks_on_one_gpu_are_refused() -> None:
    _check_own_gpus(["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 have the same GPU, b\. Start as many processes"):
        _check_own_gpus(["a", "b", "c", "b"])
