"""Ranges around the phases of a run, as torch.profiler finds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from tests.end_to_end.workbench import Job, assert_same_state
from tuningfork.ranges import phase


def test_a_profiler_finds_the_phases_of_a_run_and_no_bit_depends_on_that(job: Job, shelf: Path) -> None:
    """Two steps of one pack each, an evaluation before, between and behind them, and a checkpoint behind each."""
    job = job.but(
        {"data.eval": shelf / "held_out.jsonl", "train.max_steps": 2, "train.eval_every": 1, "output.save_every": 1}
    )
    job.done()
    named = job.elsewhere("named").but({"output.nvtx_ranges": True})
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        named.done()
    assert_same_state(named, job, 2)
    ranges = [event for event in found.events() if event.is_user_annotation and "#" not in event.name]
    counts = Counter(event.name for event in ranges)
    assert counts["step 1"] == counts["step 2"] == 1 and counts["evaluation"] == 3
    assert counts["checkpoint"] == 3  # that of the first step as the best one, too
    assert counts["data"] == 3  # the last finds that there are no more
    assert counts["head"] == counts["backward"] == counts["optimizer"] == 2 and counts["forward"] == 2
    for step in (event.time_range for event in ranges if event.name.startswith("step ")):
        within = [event for event in ranges if step.start < event.time_range.start and event.time_range.end < step.end]
        within.sort(key=lambda event: event.time_range.start)
        assert [event.name for event in within] == ["forward", "head", "backward", "optimizer"]
        _, head, backward, _ = (event.time_range for event in within)
        assert head.start < backward.start and backward.end <= head.end


def test_ranges_are_nothing_until_they_are_asked_for() -> None:
    assert phase("forward") is phase("backward")
