"""The search for a peer's best settings, on made-up cards whose best is known."""

from __future__ import annotations

import shlex

import pytest

from bench import peers
from bench.peer_search import Settings, search


class Card:
    """A card with `room` units of memory: a pair takes 10 of them, or 2 with recomputation, which costs a third."""

    def __init__(self, room: int, faster: tuple[tuple[str, object, float], ...] = (), fails: tuple[str, ...] = ()):
        self.room, self.faster, self.fails = room, faster, fails
        self.tried: list[Settings] = []

    def rate(self, settings: Settings) -> float | None:
        self.tried.append(settings)
        if settings.bs * (2 if settings.gc else 10) > self.room or any(
            f" {word}" in str(settings) for word in self.fails
        ):
            return None
        speed = 10 * settings.bs / (settings.bs + 4) * (2 / 3 if settings.gc else 1)
        for name, value, factor in self.faster:
            if getattr(settings, name) == value:
                speed *= factor
        return speed


@pytest.mark.parametrize(
    ("room", "best"),
    [
        (80, Settings(8, 0)),  # 8 fit without recomputing: 6.67 pairs/s; with it 32 fit: 5.93
        (40, Settings(4, 0)),  # 5 pairs/s; with recomputing 16 fit: 5.33, which is more
        (1000, Settings(64, 0)),  # grows as far as it fits
        (8, Settings(4, 1)),  # nothing fits but with recomputing, and smaller than where the search begins
    ],
)
def test_the_best_size_is_found_on_either_side_of_where_the_search_begins(room, best):
    card = Card(room)
    found = search(card.rate)
    every = [Settings(2**n, gc) for n in range(8) for gc in (0, 1)]
    truth = max(every, key=lambda settings: card.rate(settings) or 0)
    assert found[0][1] == truth
    if room != 40:
        assert truth == best
    again = card.tried[: -len(every)]
    assert again[0] == again[1] and len(again) == len(set(again)) + 1  # nothing but the first is run twice


def test_changes_that_help_are_kept_together_and_what_fails_is_passed_over():
    card = Card(
        80, faster=(("attn", "flex_attention", 1.2), ("liger", 0, 1.1), ("group", 1, 0.9)), fails=("--compile 1",)
    )
    (rate, best), *others = search(card.rate)
    assert best == Settings(8, 0, liger=0, attn="flex_attention")
    assert rate == pytest.approx(20 / 3 * 1.2 * 1.1)
    assert all(other.compile == 0 for _, other in others) and any(tried.compile for tried in card.tried)
    assert [one for one, _ in others] == sorted((one for one, _ in others), reverse=True)


def test_the_size_is_looked_for_again_where_a_change_makes_room_for_more():
    """Rates of one card: a larger batch fits only with the other attention, and pays."""
    rates = {
        (8, "sdpa"): 1.0,
        (4, "sdpa"): 2.0,
        (2, "sdpa"): 1.5,
        (4, "flex_attention"): 3.0,
        (8, "flex_attention"): 4.0,
    }

    def rate(settings: Settings) -> float | None:
        plain = settings.gc == 0 and settings.compile == 0 and settings.group == 0 and settings.liger == 1
        return rates.get((settings.bs, settings.attn)) if plain else None

    assert search(rate)[0] == (4.0, Settings(8, 0, attn="flex_attention"))


def test_a_peer_that_never_runs_ends_the_search():
    card = Card(0)
    assert search(card.rate) == []
    assert len(card.tried) < 20


def test_settings_are_flags_of_the_peers_script():
    text = str(Settings(8, 0, attn="flex_attention"))
    assert shlex.split(text)[:2] == ["--bs", "8"]
    script = (peers.ROOT / "bench" / "trl_bench.py").read_text()
    assert all(f'add_argument("{flag}"' in script for flag in shlex.split(text)[::2])
    assert peers.trl(text, 192).needs == ("trl", "datasets", "liger_kernel")
    assert peers.trl("--liger 0", 192).needs == ("trl", "datasets")
