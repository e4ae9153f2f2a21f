"""Processes that are not alike are told apart before a run begins, in one message on all of them."""

from __future__ import annotations

import pytest

from tests.distributed.worlds import together
from tuningfork.distributed.alike import check_alike, versions
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import ConfigError


def _differing(ranks: Ranks) -> str:
    facts = {**versions(), "train.seed": 3 if ranks.rank == 2 else 0}
    with pytest.raises(ConfigError) as caught:
        check_alike(ranks, facts, "Mend it.")
    check_alike(ranks, versions(), "Mend it.")
    return str(caught.value)


def test_the_rank_that_is_not_like_the_first_is_named_on_all() -> None:
    said = together(3, _differing)
    assert len(set(said)) == 1
    assert "train.seed: 3 on rank 2 (" in said[0] and "0 on rank 0" in said[0] and said[0].endswith("Mend it.")


def test_one_process_is_like_itself() -> None:
    check_alike(ONE_PROCESS, versions(), "")
