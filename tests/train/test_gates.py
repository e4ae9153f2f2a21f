"""Gates that collapse are named once, and not for a single batch."""

from __future__ import annotations

from tuningfork.train.gates import GateWatch

OPEN = {"nsa/gate_cmp": 0.5, "nsa/gate_slc": 0.5, "nsa/gate_win": 0.5, "nsa/gate_entropy": 1.0986}
SHUT = {"nsa/gate_cmp": 0.01, "nsa/gate_slc": 0.005, "nsa/gate_win": 0.97, "nsa/gate_entropy": 0.08}


def test_gates_that_are_shut_for_three_steps_in_a_row_are_named_once() -> None:
    watch = GateWatch()
    assert [watch.add(means) for means in (SHUT, SHUT, OPEN, SHUT, SHUT)] == [None] * 5
    said = watch.add(SHUT)
    assert said is not None
    assert said.startswith("the gates of native sparse attention have collapsed onto the window: ")
    assert "nsa/gate_entropy is 0.080 nats" in said
    assert "compressed blocks 0.010, chosen blocks 0.005, the window 0.970" in said
    assert watch.add(SHUT) is None


def test_models_without_gates_have_none_that_collapse() -> None:
    assert GateWatch().add({"loss": 1.0}) is None
