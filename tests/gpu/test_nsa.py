"""The fast kernels of native sparse attention on a GPU: near the truth, and the same bits wherever a row lies."""

from __future__ import annotations

import pytest
import torch
import torch.fx.experimental._config  # private: torch.fx.experimental._config.use_duck_shape

from tests.forests import Known, laid, random_forest, stem_of_many, ways_to_lie
from tests.sparse_attention import (
    Form,
    Sizes,
    check_choices,
    check_error_and_repeat,
    check_paths_decide_bits,
    check_selected,
    random_inputs,
)
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.nsa.plain import Choice, Grid

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
SHORT, FEW = Grid(16, 8, 32), Choice(3, 1, 1)
SIZES = [
    Sizes(12, 2, 64, 64, SHORT, FEW),  # six heads a group
    Sizes(32, 2, 128, 128, SHORT, FEW),
    Sizes(16, 1, 192, 128, SHORT, FEW),
    Sizes(6, 2, 136, 256, SHORT, FEW),
    Sizes(2, 2, 16, 24, Grid(8, 4, 16), Choice(4, 1, 2)),
    Sizes(3, 1, 24, 16, Grid(16, 4, 48), Choice(2, 1, 1)),
    Sizes(4, 1, 32, 32, Grid(32, 16, 128), Choice(1, 0, 1)),
    Sizes(2, 1, 16, 16, Grid(1, 1, 1), Choice(9, 2, 3)),
]
sizes = pytest.mark.parametrize("sizes", SIZES, ids=["-".join(map(str, one[:4])) for one in SIZES])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def fast() -> type:
    from tuningfork.kernels.nsa.fast import TritonNsa

    return TritonNsa


@pytest.fixture(params=["by row", "by block"])
def form(request, monkeypatch) -> str:
    """Selected attention takes this form, whatever the sizes."""
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.LEAST_HEADS_BY_ROW", 0 if request.param == "by row" else 1000)
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.WIDEST_BY_BLOCK", 1000)
    return request.param


@pytest.mark.parametrize("share", ["tree", "none"])
@sizes
@dtypes
def test_the_error_is_what_the_dtype_allows_and_bits_repeat(dtype, sizes, share, fast):
    batch = laid(random_forest(3, depth=6), share).to(DEVICE)
    check_error_and_repeat(fast, batch, sizes, dtype, mean=share == "none")
    check_choices(fast, batch, sizes, dtype)


@sizes
@dtypes
def test_selected_attention_has_its_error_in_both_forms(dtype, sizes, form, fast):
    check_selected(fast, laid(random_forest(3, depth=6), "tree").to(DEVICE), sizes, dtype)
    check_selected(fast, laid(stem_of_many(2000, 30), "prompt").to(DEVICE), sizes, dtype)


@sizes
@dtypes
def test_launches_and_parts_do_not_touch_what_a_row_has(dtype, sizes, fast, monkeypatch):
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.LEAST_HEADS_BY_ROW", 1000)
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.WIDEST_BY_BLOCK", 1000)
    batch = laid(random_forest(3, depth=6), "tree").to(DEVICE)
    whole = check_selected(fast, batch, sizes, dtype)
    monkeypatch.setattr("tuningfork.kernels.nsa._by_block._HELD", 1)  # 64 rows
    monkeypatch.setattr("tuningfork.kernels.nsa._by_block._PART", 5)
    parts = check_selected(fast, batch, sizes, dtype)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@dtypes
def test_long_and_short_documents(dtype, fast):
    """Rows with many blocks to choose from, and blocks that thousands of rows read."""
    lengths = (1, 31, 32, 33, 63, 64, 65, 500, 1023, 4096)
    batch = one_pack(random_examples([(0, (n,)) for n in lengths]), "none", tokens=6016).to(DEVICE)
    long = Sizes(6, 1, 64, 64, Grid(32, 16, 64), Choice(16, 1, 2))
    check_error_and_repeat(fast, batch, long, dtype, mean=True)
    check_choices(fast, batch, long, dtype)


def test_scores_in_chunks_choose_as_all_at_once(fast, monkeypatch):
    from tuningfork.kernels.nsa import _compressed

    batch = one_pack(random_examples([(300, (200, 500)), (0, (900,))]), "prompt", tokens=1984).to(DEVICE)
    given = [t.to(DEVICE) for t in random_inputs(Known().rows(batch.to(torch.device("cpu"))), SIZES[0], torch.bfloat16)]
    _, whole = Form(fast, batch.layout).read(given, SIZES[0])
    monkeypatch.setattr(_compressed, "_SCORES", 1)
    _, parts = Form(fast, batch.layout).read(given, SIZES[0])
    assert torch.equal(whole, parts)


@dtypes
def test_a_prompt_that_many_answers_go_on_from(dtype, fast):
    check_error_and_repeat(fast, laid(stem_of_many(6000, 60), "prompt").to(DEVICE), SIZES[0], dtype)


@pytest.mark.parametrize("seed", range(2))
@sizes
@dtypes
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, sizes, seed, form, fast):
    check_paths_decide_bits(fast, [batch.to(DEVICE) for batch in ways_to_lie(seed)], sizes, dtype)


@dtypes
def test_long_paths_cut_often_have_the_bits_of_uncut_ones(dtype, form, fast):
    examples = random_forest(7, roots=1, depth=60, longest=3000)[:24]
    packs = [laid(examples, "tree").to(DEVICE), *(laid([example], "none").to(DEVICE) for example in examples[::6])]
    check_paths_decide_bits(fast, packs, SIZES[0], dtype)


@dtypes
def test_equal_scores_go_to_the_lowest_blocks_every_time(dtype, fast):
    batch = one_pack(random_examples([(0, (300,))]), "none", tokens=320).to(DEVICE)
    sizes = Sizes(choice=Choice(5, 1, 2))
    numbers = torch.arange(len(batch.input_ids))
    query, ck, cv = (torch.ones_like(t).to(DEVICE) for t in random_inputs(numbers, sizes, dtype)[:3])
    op = fast.prepare(batch.layout, sizes.grid)
    how = {"scale": sizes.scale, "choice": sizes.choice}
    for _ in range(100):
        _, chosen = op.compressed(query, op.mean(ck), op.mean(cv), **how)
        assert chosen[299].tolist() == [[0, 1, 2, 17, 18]] * 2


@dtypes
def test_rows_may_lie_with_any_stride(dtype, fast):
    """As they do in one tensor of queries, keys and values."""
    batch = laid(random_forest(2), "tree")
    given = [t.to(DEVICE) for t in random_inputs(Known().rows(batch), SIZES[0], dtype)]
    rows = torch.cat([t.flatten(1) for t in given], dim=1)
    parts = rows.split([t[0].numel() for t in given], dim=1)
    strided = [part.unflatten(1, like.shape[1:]) for part, like in zip(parts, given, strict=True)]
    form = Form(fast, batch.to(DEVICE).layout, mean=True)
    for one, other in zip(form.read(given, SIZES[0]), form.read(strided, SIZES[0]), strict=True):
        assert torch.equal(one, other)


def test_neither_preparing_nor_attending_waits_for_the_device(form, fast):
    batch = laid(random_forest(1), "tree")
    given = [t.to(DEVICE).requires_grad_() for t in random_inputs(Known().rows(batch), SIZES[0], torch.bfloat16)]
    layout = batch.to(DEVICE).layout
    learned_too = [Form(fast, layout, mean) for mean in (True, False)]
    for form in learned_too:
        form.read(given, SIZES[0])[0].sum().backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for form in learned_too:
            form.read(given, SIZES[0])[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_are_compiled_once_for_all_packs(form, fast):
    """Of one size: what counts rows, parts or tiles of a pack is no constant of theirs."""
    from tuningfork.kernels import nsa

    def compiled() -> int:
        modules = [module for name, module in vars(nsa).items() if name.endswith("_kernels")]
        kernels = [k for module in modules for k in vars(module).values()]
        caches = [k.device_caches for k in kernels if hasattr(k, "device_caches")]
        return sum(len(of_device[0]) for cache in caches for of_device in cache.values())

    before = []
    for number, shape in enumerate([(100, (300, 100)), (3, (700,)), (0, (64, 1, 33))]):
        batch = one_pack(random_examples([shape]), "prompt", tokens=768)
        leaves = [t.to(DEVICE).requires_grad_() for t in random_inputs(Known().rows(batch), SIZES[0], torch.bfloat16)]
        Form(fast, batch.to(DEVICE).layout, mean=True).read(leaves, SIZES[0])[0].sum().backward()
        before.append(compiled())
        assert before[number] == before[0]


@torch.fx.experimental._config.patch(use_duck_shape=False)  # as models are compiled: tables have sizes of their own
def test_compiled_it_has_the_same_bits_and_one_graph_for_all_packs(form, fast):
    def layer(form, cq, ck, cv, q, k, v):
        keys, values = form.mean(ck * 0.5), form.blocks(cv).amax(1)  # a sum has an order of its own in a graph
        out, chosen = form.compressed(cq, keys, values, scale=0.125, choice=FEW)
        return out + form.selected(q, k, v, chosen, scale=0.125)

    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    packs = [
        laid(random_forest(1), "tree"),
        laid(random_forest(2, depth=2), "none"),
        laid(random_examples([(200, (300, 100))]), "prompt"),
    ]
    for number, batch in enumerate(packs):
        form = fast.prepare(batch.to(DEVICE).layout, SHORT)
        leaves = [t.to(DEVICE).requires_grad_() for t in random_inputs(Known().rows(batch), SIZES[0], torch.float32)]
        expected = layer(form, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(form, *leaves)
        assert torch.equal(expected, found)
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
