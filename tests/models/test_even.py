"""Functions of single elements on a CPU: the same bits wherever an element lies, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.tiny import VOCAB, random_examples, scorer_of
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.even import PIECE, _slabs, evenly
from tuningfork.models.hf import attention
from tuningfork.models.policy import Policy

CPU = torch.device("cpu")
FUNCTIONS = {f.__name__: f for f in (torch.exp, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.softplus)}


@pytest.fixture(params=[1, 3, 4, 6])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_lies(name: str, dtype: torch.dtype, threads: int) -> None:
    rows = 3 * torch.randn(64, 688, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    function = FUNCTIONS[name]
    with evenly(CPU, compiled=False):
        alone = function(rows)
        for before, behind in ((64, 0), (7, 57), (192, 320)):
            among = torch.cat([rows.new_ones(before, 688), rows, rows.new_ones(behind, 688)])
            assert torch.equal(function(among)[before : before + 64], alone)
            assert torch.equal(among.exp_()[before : before + 64], rows.exp())


def test_what_is_computed_is_what_is_computed_otherwise() -> None:
    rows = torch.randn(5, 3 * PIECE + 11, dtype=torch.float64, requires_grad=True)
    expected = F.silu(rows)
    (gradient,) = torch.autograd.grad(expected.sum(), rows)
    with evenly(CPU, compiled=False):
        found = F.silu(rows)
        assert torch.allclose(found, expected, rtol=1e-15, atol=0)
        assert torch.allclose(torch.autograd.grad(found.sum(), rows)[0], gradient, rtol=1e-14, atol=0)
        assert torch.equal(F.silu(rows.mT).mT, expected)  # does not lie side by side
        assert torch.equal(rows**2, rows * rows)


@pytest.mark.parametrize("elements", [1, PIECE, PIECE + 1, 3 * PIECE, 7 * PIECE + 5, 9 * PIECE])
def test_pieces_are_whole(elements: int) -> None:
    slabs = _slabs(elements, 6 * PIECE)
    assert slabs[0][0] == 0 and slabs[-1][1] == elements
    assert all(end == begin for (_, end), (begin, _) in pairwise(slabs))
    sizes = [end - begin for begin, end in slabs]
    assert {*sizes[:-1]} <= {6 * PIECE, PIECE} and (sizes[-1] <= PIECE or sizes[-1] == 6 * PIECE)


def test_scores_have_the_same_bits_in_every_pack(threads: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    scorer = scorer_of(Policy.fast(model, torch.float32), 256)
    examples = random_examples([(9, (30, 40)), (5, (8, 60)), (17, (23, 20)), (2, (3, 100))] * 5)
    found = []
    for tokens in (256, 2048):
        packs = build_packs(examples, PackLimits.plan(tokens, "prompt", compiled=False))
        scores = [
            (e.id, logps) for p in packs for e, logps in zip(p.examples, scorer.score(p).view(-1, 2), strict=True)
        ]
        found.append({name: logps.tolist() for name, logps in scores})
    assert found[0] == found[1]
