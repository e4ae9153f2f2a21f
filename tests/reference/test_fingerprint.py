"""Two runs may share log-probs exactly if everything that decides a bit is the same."""

from __future__ import annotations

import itertools
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import transformers

from tests.tiny import tiny_model
from tuningfork.reference import fingerprint as module
from tuningfork.reference.fingerprint import (
    LAYOUT_VERSION,
    differing_facts,
    fingerprint,
    tensors_of,
    text_digest,
    weights_digest,
)


def named(*tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", tensor) for i, tensor in enumerate(tensors)]


def test_one_bit_of_one_weight_is_another_model():
    model = tiny_model("llama", torch.float32)
    before = weights_digest(model.named_parameters())
    assert weights_digest(model.named_parameters()) == before
    weight = model.model.layers[2].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[5, 7].clone()
        weight[5, 7] = torch.nextafter(kept, torch.tensor(torch.inf))
        assert weights_digest(model.named_parameters()) != before
        weight[5, 7] = kept
    assert weights_digest(model.named_parameters()) == before


def test_the_same_weights_elsewhere_are_the_same_model():
    """trl PR#6206: a fingerprint with anything random in it never hits."""
    one, two = tiny_model("qwen2", torch.float32), tiny_model("qwen2", torch.float32)
    assert weights_digest(one.named_parameters()) == weights_digest(two.named_parameters())
    assert weights_digest(reversed(list(one.named_parameters()))) == weights_digest(two.named_parameters())
    other = tiny_model("qwen2", torch.float32, seed=1)
    assert weights_digest(one.named_parameters()) != weights_digest(other.named_parameters())


def test_the_digest_sees_names_shapes_dtypes_and_where_one_tensor_ends():
    base = torch.arange(12, dtype=torch.float32)
    digests = [
        weights_digest(named(base)),
        weights_digest(named(base.reshape(3, 4))),
        weights_digest(named(base.reshape(4, 3))),
        weights_digest(named(base.to(torch.bfloat16))),
        weights_digest(named(base.view(torch.int32))),  # equal bytes
        weights_digest([("other", base)]),
        weights_digest(named(base[:6], base[6:])),
        weights_digest(named(base[:5], base[5:])),
        weights_digest(named(base, torch.zeros(0))),
    ]
    assert len(set(digests)) == len(digests)


def test_minus_zero_is_another_bit():
    assert weights_digest(named(torch.tensor([0.0]))) != weights_digest(named(torch.tensor([-0.0])))


def test_only_the_numbers_of_a_view_count():
    whole = torch.randn(6, 4)
    assert weights_digest(named(whole.t()[1:3])) == weights_digest(named(whole.t()[1:3].clone()))
    assert weights_digest(named(torch.tensor(3.0))) != weights_digest(named(torch.tensor(4.0)))


@pytest.mark.parametrize("shape", [(100,), (20, 5), (5, 4, 5)])
def test_every_number_of_every_row_counts_in_its_place(monkeypatch, shape):
    monkeypatch.setattr("tuningfork.reference.fingerprint._PIECE", 64)
    base = torch.arange(100, dtype=torch.float32)
    changed = [base.clone() for _ in base]
    for place, tensor in enumerate(changed):
        tensor[place] += 0.5
    swapped = torch.cat([base[20:40], base[:20], base[40:]])
    assert len({weights_digest(named(tensor.view(shape))) for tensor in [base, swapped, *changed]}) == 102


@pytest.mark.parametrize("piece", [1, 60, 1 << 20])  # bytes; a row has 20
@pytest.mark.parametrize("cuts", [(0, 20), (0, 1, 20), (0, 7, 7, 14, 20)])
def test_rows_may_lie_apart(monkeypatch, piece, cuts):
    """Each process counts its own, and the sums are added up."""
    monkeypatch.setattr("tuningfork.reference.fingerprint._PIECE", piece)
    base = torch.arange(100, dtype=torch.float32).view(20, 5)
    shares: list[int] = []
    for start, end in itertools.pairwise(cuts):
        weights_digest(named(base), lambda t, s=start, e=end: (t[s:e], s), lambda own: shares.append(own) or [own])
    monkeypatch.undo()
    assert weights_digest(named(base), lambda t: None, lambda own: [own, *shares]) == weights_digest(named(base))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_the_same_by_any_number_of_threads(monkeypatch, threads):
    weights = list(tiny_model("qwen2", torch.float32).named_parameters())
    monkeypatch.setattr("tuningfork.reference.fingerprint._PIECE", 1000)
    by_eight = weights_digest(weights)
    monkeypatch.setattr("tuningfork.reference.fingerprint._THREADS", threads)
    assert weights_digest(weights) == by_eight


def test_a_digest_of_old_stays_what_it_was():
    """Caches on disks hold it; whoever changes it raises LAYOUT_VERSION. The 6th hashes weights by rows."""
    weights = named(
        torch.arange(5 << 20, dtype=torch.float32).view(-1, 1 << 10), torch.tensor(3.0, dtype=torch.bfloat16)
    )
    assert (LAYOUT_VERSION, weights_digest(weights)) == ("6", "07ce48ba0ff677219308dbaa94b80647")


def test_facts_enter_beside_the_weights():
    base = fingerprint("ab12", dtype="float32", device="H200")
    assert {"weights", "dtype", "device", "code", "layout", "torch", "triton"} == set(base)
    assert base["torch"] == torch.__version__
    for change in ({"dtype": "bfloat16"}, {"device": "H100"}):
        other = fingerprint("ab12", **{"dtype": "float32", "device": "H200", **change})
        [(fact, value)] = change.items()
        assert differing_facts(other, base) == [(fact, value, base[fact])]
    assert [d[0] for d in differing_facts(fingerprint("cd34", dtype="float32", device="H200"), base)] == ["weights"]


def test_triton_counts_in_whatever_package_it_comes(monkeypatch):
    """It compiles the kernels; another version may add up in another order."""

    def of(**installed: str) -> str:
        def version(name: str) -> str:
            if name not in installed:
                raise PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(module, "version", version)
        return fingerprint("ab12")["triton"]

    assert of(triton="3.5.0") == "3.5.0" != of(triton="3.6.0")
    assert of(**{"pytorch-triton": "3.5.1"}) == "3.5.1"
    assert of() == "none"


def test_every_buffer_counts_stored_or_computed():
    """Apertus keeps numbers of its activation in a buffer; rotations are computed from the config."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ApertusConfig(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = weights_digest(tensors_of(model))
    for buffer in (model.model.layers[0].mlp.act_fn.beta, model.model.rotary_emb.inv_freq):
        kept = buffer.clone()
        buffer.mul_(1.5)
        assert weights_digest(tensors_of(model)) != before
        buffer.copy_(kept)
    assert weights_digest(tensors_of(model)) == before
    stored = set(model.state_dict())
    assert {name for name, _ in tensors_of(model)} > stored - {"lm_head.weight"}


def test_differing_facts_name_both_values_and_what_is_absent():
    assert differing_facts({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        ("a", "1", "absent"),
        ("b", "2", "3"),
        ("c", "absent", "4"),
    ]
    assert differing_facts({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == []


@pytest.mark.parametrize(("a", "b"), [("", " "), ("x", "y"), ("ü", "u")])
def test_text_digest_tells_texts_apart(a, b):
    assert text_digest(a) != text_digest(b)
    assert text_digest(a) == text_digest(a)
