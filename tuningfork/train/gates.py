"""Whether the gates of native sparse attention still let through more than one branch."""

from __future__ import annotations

from collections.abc import Mapping

_LEAST = 0.2  # nats of the gates' shares: one of them is some 96 %
_STEPS = 3  # in a row, so that no single batch is taken for it
_BRANCHES = {"nsa/gate_cmp": "compressed blocks", "nsa/gate_slc": "chosen blocks", "nsa/gate_win": "the window"}


class GateWatch:
    """Finds gates that have collapsed onto one branch: the others get no gradient to come back with."""

    def __init__(self) -> None:
        self._low, self._said = 0, False

    def add(self, means: Mapping[str, float | None]) -> str | None:
        """The means of a step. A sentence where gates have been collapsed for some steps, once."""
        entropy = means.get("nsa/gate_entropy")
        if entropy is None:
            return None
        self._low = self._low + 1 if entropy < _LEAST else 0
        if self._low < _STEPS or self._said:
            return None
        self._said = True
        gates = {words: means[name] or 0.0 for name, words in _BRANCHES.items()}
        branch = max(gates, key=lambda words: gates[words])
        found = ", ".join(f"{words} {gate:.3f}" for words, gate in gates.items())
        return (
            f"the gates of native sparse attention have collapsed onto {branch}: nsa/gate_entropy is {entropy:.3f} "
            f"nats (1.099 where all are as large), gates are {found}. Lower train.learning_rate, or go back to an "
            "earlier checkpoint"
        )
