"""kill -9 of a random rank at a random moment, then --resume; kills.py does it a hundred times."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.kills import finished, killed_again_and_again, prepared, start


def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    prepared(tmp_path)
    assert finished(start(tmp_path, "whole", 2, resume=False)) == [0, 0]
    assert killed_again_and_again(tmp_path, "killed", 2, kills=3, seed=1) == 3
