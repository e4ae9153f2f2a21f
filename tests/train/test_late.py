"""Compilations behind the first steps are counted, and each is warned of with what asked for it."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch

from tests.tiny import limits_of, random_examples, scorer_of, tiny_policy
from tuningfork.data.packing.loader import EpochOrder, PackLoader
from tuningfork.distributed.ranks import ONE_PROCESS
from tuningfork.models.hf.load import Loaded
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import StepResult
from tuningfork.train.config import TrainConfig
from tuningfork.train.late import LateCompilations
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.session import Session
from tuningfork.train.steps import training_steps

STEP = StepResult(1, 0.1, 1e-3, 1.0, 4, 0.5, 4, 100, 80, 40, 96, 16, 2.0, 0.1, 1e9)


@pytest.fixture
def said():
    return io.StringIO()


@pytest.fixture
def late(said):
    return LateCompilations(Console(said), ONE_PROCESS)


@pytest.fixture
def compiled_for_one_size():
    """A call compiles for each new number of rows, as nothing in a run should."""
    torch._dynamo.reset()
    yield torch.compile(lambda x: x * 1.0, backend="eager", dynamic=False)
    torch._dynamo.reset()


def test_a_recompilation_planted_in_step_5_is_warned_of_with_its_size(late, said, compiled_for_one_size):
    policy = Policy.plain(copy.deepcopy(tiny_policy("llama", torch.float32).model), torch.float32)
    policy.compiled = True  # uncompiled ones run under a mode in which nothing compiles
    block = policy.blocks[0]
    forward = block.forward
    block.forward = lambda hidden, *args, **kwargs: forward(compiled_for_one_size(hidden), *args, **kwargs)
    examples = random_examples([(5, (6, 7))] * 4 + [(60, (30, 20))] + [(5, (6, 7))] * 2)
    loader = PackLoader(examples, EpochOrder.plan(7, 1, 0, 1, None), limits_of())
    loader.examples_of = lambda step: examples[step : step + 1]
    session = Session(scorer_of(policy), ObjectiveConfig("simpo").build(), Loaded(policy.model, torch.float32))
    config = TrainConfig(examples_per_step=1)
    steps = training_steps(loader, session, build_optimizer(policy.model, config), None, config, 0)
    steps = [late.step(step) for step in steps]
    assert [step.compilations for step in steps] == [1, 0, 0, 0, 1, 0, 0]
    assert [step.compiled for step in steps] == [True, False, False, False, True, False, False]
    assert [step.late_compilations for step in steps] == [0, 0, 0, 0, 1, 1, 1]
    (line,) = said.getvalue().splitlines()
    assert line.startswith("! late compilation in step 5, which stops it for seconds: graph ")
    assert "expected 64, actual 128" in line and line.endswith("packs of 128 tokens")


def test_the_first_steps_of_a_process_compile_whatever_their_number(late, said):
    steps = [replace(STEP, step=n, compilations=1, compiled_here=(f"graph {n}",)) for n in (41, 42, 43)]
    assert [late.step(step).late_compilations for step in steps] == [0, 0, 0]
    assert said.getvalue() == ""
    assert late.step(replace(STEP, step=44, compilations=2, compiled_here=("one", "two"))).late_compilations == 2
    assert [line.rpartition(": ")[2] for line in said.getvalue().splitlines()] == ["one", "two"]


def test_the_first_evaluation_may_compile_and_the_second_may_not(late, said, compiled_for_one_size):
    for number, rows in enumerate((2, 2, 3, 3), start=1):
        with late.evaluation(after=10 * number):
            compiled_for_one_size(torch.zeros(rows))
    assert late.total == 1
    assert "! late compilation in the evaluation after step 30" in said.getvalue()
    assert "expected 2, actual 3" in said.getvalue() and len(said.getvalue().splitlines()) == 1


def test_a_storm_is_counted_whole_and_said_in_a_few_lines(late, said):
    for _ in range(3):
        late.step(STEP)
    late.step(replace(STEP, compilations=68, compiled_here=("a kernel was tuned",) * 68))
    assert late.total == 68
    assert len(said.getvalue().splitlines()) == 9 and "60 more" in said.getvalue()
