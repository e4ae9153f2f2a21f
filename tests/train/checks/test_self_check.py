"""The check of a model at its start: the pack that it is tried on, and what it finds there."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_model, tiny_policy
from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.records import GRID, ROOT, Segment
from tuningfork.train.checks.self_check import check_packed_equals_alone, probe_pack, probes


def segments_of(layout) -> list[Segment]:
    return [found for numbers in layout.segments.tolist() if (found := Segment(*numbers)).end > found.start]


def test_the_pack_is_a_tree_whose_paths_are_cut_within_steps_of_prompts_and_answers() -> None:
    policy = tiny_policy("mistral")
    examples = probes(policy)
    batch = probe_pack(examples, "tree", compiled=False)
    segments = segments_of(batch.layout)
    depths: list[int] = []
    for segment in segments:
        depths.append(1 if segment.parent == ROOT else depths[segment.parent] + 1)
    assert max(depths) == 4
    cuts = {segment.first_position for segment in segments if segment.parent != ROOT}
    p, a = len(examples[0].prompt_ids), len(examples[0].answers[0].ids)
    assert any(0 < cut < p and cut % GRID for cut in cuts)
    assert any(p < cut < p + a and cut % GRID for cut in cuts)
    assert batch.examples[: len(examples)] == tuple(examples)
    assert all(len(e.prompt_ids) + len(x.ids) <= policy.positions for e in batch.examples for x in e.answers)
    assert {int(batch.input_ids.min()) >= 0, int(batch.input_ids.max()) < policy.vocab_size} == {True}


@pytest.mark.parametrize("share", ["prompt", "none"])
def test_where_nothing_is_shared_across_examples_none_is_put_beside_them(share) -> None:
    examples = probes(tiny_policy())
    assert probe_pack(examples, share, compiled=False).examples == tuple(examples)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_model_passes_and_is_left_as_it_was(family) -> None:
    model = tiny_model(family, torch.bfloat16)
    before = [weight.clone() for weight in model.parameters()]
    check_packed_equals_alone(model, "here")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("deep", [False, True])
def test_a_path_that_loses_a_row_at_a_cut_within_a_step_is_named(monkeypatch, deep) -> None:
    """Of all cuts, or of those alone whose stem is no root."""
    prepare = PlainAttention.prepare

    def losing(layout):
        pack, highest = prepare(layout), 0 if deep else ROOT
        segments = [Segment(*numbers) for numbers in layout.segments.tolist()]
        blocks = []
        for block in pack.blocks:
            keys = block.keys.clone()
            for row, queries in zip(keys, block.queries.tolist(), strict=True):
                own = next(s for s in segments if any(s.start <= query < s.end for query in queries))
                if own.parent > highest and own.first_position % GRID > 0:
                    row[row == segments[own.parent].end - 1] = len(layout.position_of_row)
            blocks.append(block._replace(keys=keys))
        return pack._replace(blocks=blocks)

    monkeypatch.setattr(PlainAttention, "prepare", losing)
    with pytest.raises(ModelError, match="gives packed examples other log-probs than the same examples alone"):
        check_packed_equals_alone(tiny_model("llama", torch.float32), "here")
