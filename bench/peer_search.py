"""The settings with which TRL is fastest on the card at hand: found by trying, for what fits differs from card to card.

A batch size is doubled, or halved, as long as that makes training faster, without and with recomputed activations. From
the best of these, one setting after the other is changed, and a change that is faster is kept; then the size is looked
for once more. What fails (too little memory, a package that is not there, a combination that TRL refuses) has no rate
and is passed over. The first run is made twice and counts once: on a machine just started it is slower than any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

LARGEST = 128


@dataclass(frozen=True)
class Settings:
    """The flags of trl_bench.py that may change its speed."""

    bs: int  # pairs of a batch
    gc: int  # recompute activations in the backward pass
    liger: int = 1
    attn: str = "sdpa"
    compile: int = 0
    group: int = 0  # batches of pairs of like length

    def __str__(self) -> str:
        return (
            f"--bs {self.bs} --gc {self.gc} --liger {self.liger} --attn {self.attn} "
            f"--compile {self.compile} --group {self.group}"
        )


BEGIN = (Settings(bs=8, gc=0), Settings(bs=16, gc=1))
CHANGES: tuple[tuple[str, Any], ...] = (
    ("attn", "flash_attention_2"),
    ("attn", "flex_attention"),
    ("compile", 1),
    ("group", 1),
    ("liger", 0),
)


def search(rate: Callable[[Settings], float | None]) -> list[tuple[float, Settings]]:
    """All settings that ran with their rates, the fastest first. `rate`: pairs a second, None where a run fails."""
    tried: dict[Settings, float | None] = {}

    def speed(settings: Settings) -> float:
        if settings not in tried:
            tried[settings] = rate(settings)
        return tried[settings] or 0.0

    rate(BEGIN[0])
    best = max((_best_size(speed, begin) for begin in BEGIN), key=speed)
    if speed(best):  # else nothing runs, and no change will
        for flag, value in CHANGES:
            best = max(best, replace(best, **{flag: value}), key=speed)
        _best_size(speed, best)
    ran = [(found, settings) for settings, found in tried.items() if found]
    return sorted(ran, key=lambda one: -one[0])


def _best_size(speed: Callable[[Settings], float], begin: Settings) -> Settings:
    """Up from a size while that is faster; from a first size that fails, or is best so far, down."""
    best = begin
    while speed(best) and best.bs < LARGEST and speed(larger := replace(best, bs=best.bs * 2)) > speed(best):
        best = larger
    while 1 < best.bs <= begin.bs and (
        speed(smaller := replace(best, bs=best.bs // 2)) > speed(best) or not speed(best)
    ):
        best = smaller
    return best
