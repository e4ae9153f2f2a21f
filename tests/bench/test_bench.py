"""The benchmarks run, on tiny shapes, and say what they mean to say; how fast anything is stands in no test."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM

import tuningfork.kernels
from bench import (
    attention,
    causal_conv,
    ccgqa,
    elementwise,
    gated_delta,
    head,
    learning,
    memory,
    parts,
    peers,
    products,
    scale,
    shapes,
    sharing,
    split_k,
    startup,
    step,
)
from bench.device_time import DeviceProfile, category
from bench.output import table
from tests.distributed.worlds import together
from tuningfork.data.packing import layout
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.ranks import Ranks
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.models.flops import FlopCounter
from tuningfork.models.policy import Policy
from tuningfork.records import column

RESULTS = Path(peers.__file__).parent / "results" / "2026-11-28-h100-yardstick.jsonl"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_measure_returns_a_full_line(tmp_path):
    line = step.measure(
        "tiny",
        pairs=4,
        pack_tokens=4096,
        examples_per_step=2,
        epochs=2,
        activation_memory="block",
        profile=tmp_path / "profile.txt",
    )
    assert json.loads(json.dumps(line)) == line
    assert line["step0_pairs_exact"] == 2 and line["steps"] == 2
    assert line["recompiles_after_warmup"] == 0 and line["warmup_steps_left_out"] == 0
    assert line["first_loss"] == pytest.approx(0.6931471805599453)
    assert 0 < line["median_step_s"] <= line["p90_step_s"]
    assert line["activation_memory"] == "block"
    assert line["pairs_s"] > 0 and line["tokens_s"] > line["unique_tokens_s"] > 0
    assert {"device", "driver", "torch", "triton", "transformers", "command", "mfu", "hfu", "peak_gib"} <= line.keys()
    assert {"model_build_s", "reference_s", "check_s", "first_epoch_s"} <= line.keys()
    profiled = line["profile"]
    assert sum(profiled["by_category_ms"].values()) == pytest.approx(profiled["device_ms"], abs=0.01)
    assert "aten::mm" in (tmp_path / "profile.txt").read_text()
    assert "tiny" in table([line], step.COLUMNS)


def measured(ranks: Ranks) -> list[dict]:
    """Lines of two processes that share steps of two packs each, with weights gathered anew for each pack, or kept."""
    ways = [ParallelConfig(reshard_after_forward=again) for again in (True, False)]
    sizes = {"pairs": 4, "pack_tokens": 1408, "examples_per_step": 4, "epochs": 2}
    return [step.measure("tiny", **sizes, parallel=way, ranks=ranks) for way in ways]


def test_several_processes_say_how_often_they_gather_weights_and_what_their_start_took():
    here, there = together(2, measured)
    assert [line["gathers"] for line in here] == [
        {"per_block": 4, "of_the_rest": 2, "packs": 2},
        {"per_block": 1, "of_the_rest": 1, "packs": 2},
    ]
    for ours, theirs in zip(here, there, strict=True):
        assert ours["gathers"] == theirs["gathers"] and ours["startup"] == theirs["startup"]
        assert list(ours["startup"]) == ["model_build_s", "spread_s", "reference_s", "check_s", "first_step_s"]
        assert all(seconds >= 0 for seconds in ours["startup"].values()) and ours["startup"]["first_step_s"] > 0
        assert ours["steps"] == 1


def test_measure_refuses_what_has_no_steady_step():
    with pytest.raises(ValueError, match="warms up"):
        step.measure("tiny", pairs=4, examples_per_step=2, epochs=1)


def test_hardware_flops_add_a_forward_pass_of_the_blocks_only():
    examples = shapes.yardstick(8)
    for mode in ("block", "offload"):
        assert step.recomputed_share(mode, FlopCounter(1000, 0), examples) == pytest.approx(1 / 3)
        assert step.recomputed_share(mode, FlopCounter(0, 1000), examples) == 0
    assert step.recomputed_share("none", FlopCounter(1000, 0), examples) == 0
    assert step.recomputed_share("budget:0.5", FlopCounter(1000, 0), examples) is None


def test_memory_has_a_line_for_every_mode_even_one_that_is_refused(capsys):
    sizes = ["--model", "tiny", "--pairs", "4", "--pack_tokens", "4096", "--examples_per_step", "2"]
    memory.main([*sizes, "--modes", "none", "budget:0.5", "offload", "auto"])
    out = capsys.readouterr().out
    lines = json_lines(out)
    assert [line["mode"] for line in lines] == ["none", "budget:0.5", "offload", "auto"]
    assert [line.get("activation_memory") for line in lines] == ["none", None, "offload", "none"]
    assert "model.compile" in lines[1]["note"] and "pairs_s" not in lines[1]
    assert all(line["pairs_s"] > 0 and not line["note"] for line in (lines[0], *lines[2:]))
    assert len({line["last_loss"] for line in lines if not line["note"]}) == 1
    assert "peak GiB" in out


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("olmo2_1b", 1_484_916_736),
        ("olmo2_7b", 7_298_617_344),
        ("qwen3_1_7b", 1_720_574_976),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_shapes_have_as_many_weights_as_the_published_models(name, parameters):
    assert sum(p.numel() for p in shapes.build(name, "meta").parameters()) == parameters


def test_ids_are_taken_modulo_a_smaller_vocabulary():
    whole, small = shapes.yardstick(3), shapes.yardstick(3, 512)
    for a, b in zip(whole, small, strict=True):
        assert (a.prompt_ids % 512 == b.prompt_ids).all() and b.answers[1].ids.max() < 512
    assert max(example.prompt_ids.max() for example in whole) > 512


WINDOW = "attention or window"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", WINDOW),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64>", WINDOW),
        ("triton_tem_fused_flex_attention_0", WINDOW),
        ("_query_gradient", WINDOW),
        ("conv_gradient_of_rows", "convolution"),
        ("delta_query_gradient", "scan"),
        ("void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, ReduceAdd>", "gather/scatter"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", "gather/scatter"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*)", "gather/scatter"),
        ("triton_poi_fused__to_copy__unsafe_view_index_select_select_transpose_view_3", "gather/scatter"),
        ("_forward", "head rows"),
        ("_backward", "head rows"),
        ("multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>", "optimizer+norms of gradients"),
        ("multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>", "optimizer+norms of gradients"),
        ("triton_poi_fused__unsafe_view_mul_silu_6", "elementwise"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float> >", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
    ],
)
def test_kernels_are_sorted_by_name(kernel, kind):
    assert category(kernel) == kind


def launched_kernels() -> set[str]:
    """Triton's functions of ours that no other of them calls: they are launched, under these names."""
    calls = {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for source in Path(tuningfork.kernels.__file__).parent.rglob("*.py")
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    }
    return calls.keys() - set().union(*calls.values())


def test_every_kernel_of_ours_is_work_of_a_named_kind():
    """None counts as the rest. Those of native sparse attention have a kind for each of its branches."""
    kinds = {name: category(name) for name in launched_kernels()}
    assert len(kinds) > 40 and [name for name, kind in kinds.items() if kind == "elementwise"] == []

    def of(prefix: str) -> set[str]:
        return {kind for name, kind in kinds.items() if name.startswith(prefix)}

    assert of("nsa_mean") == of("nsa_compressed") == {"compressed attention"}
    assert of("nsa_scores") == of("nsa_choose") == {"scores and choice of blocks"}
    assert of("nsa_lists") == of("nsa_block") == of("nsa_selected") == {"selected attention"}
    assert of("nsa_sum") == {"sums of gradients of compressed and selected keys"}
    assert of("fork_") == {WINDOW} and of("_forward") == of("_backward") == {"head rows"} and of("delta_") == {"scan"}
    assert of("conv_") == of("query_key") == of("gradient_of") == of("shift_") == {"convolution"}


def test_annotations_and_the_host_count_for_nothing():
    def event(name, us, annotation=False, where=DeviceType.CUDA, start=0.0):
        span = SimpleNamespace(elapsed_us=lambda: us, start=start, end=start + us)
        return SimpleNamespace(name=name, is_user_annotation=annotation, device_type=where, time_range=span)

    profile = DeviceProfile()
    profile.add(
        [
            event("nvjet_a", 3000.0),
            event("nvjet_a", 1000.0, start=7000.0),
            event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 4000.0, start=2000.0),
            event("Optimizer.step#AdamW.step", 9000.0, annotation=True),
            event("Optimizer.step#AdamW.step", 9000.0),
            event("aten::mm", 9000.0, where=DeviceType.CPU),
        ],
        on_device=True,
    )
    summary = profile.summary(steps=2, wall_seconds=0.01)
    assert (summary["device_ms"], summary["busy_ms"], summary["exposed_ms"]) == (4.0, 3.5, 1.5)
    assert profile.by_category(2)["matrix products"] == 2.0
    assert profile.pauses(steps=2) == {("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "nvjet_a"): 0.5}
    report = profile.report(2, 0.01, {"device": "card"})
    assert "device busy for 3.5 ms of 5.0 ms wall (70.0 %), for 1.5 ms only by talking to others" in report
    assert [line.split()[:3] for line in report.splitlines() if line.endswith("products  nvjet_a")] == [
        ["2.0", "1.0", "2,000.0"]
    ]


def test_head_compares_on_the_same_inputs(capsys):
    head.main(["--rows", "96", "--hidden", "16", "--vocabulary", "50", "--chunk_rows", "64", "--repeats", "1"])
    out = capsys.readouterr().out
    lines = {line["form"]: line for line in json_lines(out)}
    assert {"ours", "plain", "liger"} <= lines.keys()
    assert lines["ours"]["ms"] > 0 and not lines["ours"]["note"]
    assert "missing" in lines["liger"]["note"]
    assert "TFLOP/s" in out


@pytest.mark.parametrize("rows", [2, 700, 5000])
def test_head_packs_have_exactly_the_rows_asked_for(rows):
    assert len(head.pack_of(rows, 100).logit_rows) == rows


def test_attention_says_what_sharing_saves(capsys):
    options = ["--shapes", "2x1x8", "--pairs", "2", "--ratios", "6", "--answer", "16", "--tokens", "2048"]
    attention.main([*options, "--repeats", "1", "--layers", "2"])
    out = capsys.readouterr().out
    lines = json_lines(out)
    assert [(line["pairs"], line["shared"]) for line in lines] == [
        *(("yardstick", shared) for shared in ("shared", "unshared")),
        *(("equal", shared) for shared in ("shared", "unshared")),
    ]
    assert all(line["kernel"] == "plain" and line["train_ms"] > 0 for line in lines)
    assert lines[2]["saved_tokens"] == pytest.approx(1 - 8 / 14, abs=1e-3)
    assert "note" not in lines[0]


def test_sharing_compares_packs_of_the_same_rows(capsys, monkeypatch):
    monkeypatch.setattr(sharing, "WARMUP", 0)
    sharing.main(["--ratios", "0.5", "6", "--pairs", "16", "--repeats", "2"])
    yardstick, short, long = json_lines(capsys.readouterr().out)
    assert yardstick["pairs"] == "yardstick" and (short["ratio"], long["ratio"]) == (0.5, 6.0)
    # a prompt of half an answer, laid once of twice, and one of six answers
    assert short["saved_tokens"] == pytest.approx(1 - 2.5 / 3, abs=1e-3)
    assert long["saved_tokens"] == pytest.approx(1 - 8 / 14, abs=1e-3)
    # answers of 64 tokens in 4,096 rows: 8 pairs of 512 rows; 4 of 896, then answers of 32 and 4 tokens
    assert (long["shared_pairs"], long["unshared_pairs"]) == (8, 6)
    assert long["shared_plain_tokens"] == 8 * 14 * 64
    assert long["unshared_plain_tokens"] == 14 * (4 * 64 + 32 + 4)
    # of a plain token, from triangles of prompt and answers, and each answer's queries before the prompt's keys
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    once = (triangle(384) + 2 * (triangle(64) + 64 * 384)) / (14 * 64)
    repeated = 2 * (4 * triangle(448) + triangle(224) + triangle(28)) / long["unshared_plain_tokens"]
    assert long["saved_pairs"] == pytest.approx(1 - once / repeated, abs=1e-3)
    for line in (yardstick, short, long):
        costs = [line[f"{which}_ms"] / line[f"{which}_plain_tokens"] for which in ("shared", "unshared")]
        assert line["saved"] == pytest.approx(1 - costs[0] / costs[1], abs=1e-3)
        assert line["reached"] == pytest.approx(line["saved"] / line["saved_tokens"], abs=1e-2)


def test_sharing_fills_a_pack_with_what_fits():
    examples = shapes.random_pairs([(10, 20, 30), (100, 10, 10), (10, 5, 5)], 100)
    assert [e.unique_tokens for e in sharing.fill(examples, 128, True).examples] == [60, 20]
    assert [len(sharing.fill(examples, rows, False).examples) for rows in (70, 100)] == [1, 2]


def test_the_scan_is_timed_and_compared_with_float64(capsys):
    gated_delta.main(["--shapes", "1x2x8x12", "--pairs", "2", "--tokens", "2048", "--repeats", "1"])
    lines = json_lines(capsys.readouterr().out)
    assert [line["layout"] for line in lines] == ["shared", "unshared", "document"]
    assert all(line["kernel"] == "plain" and line["train_ms"] > 0 and "note" not in line for line in lines)
    assert all(0 < max(line["error"], line["error_gradient"]) < 1e-5 for line in lines)


def test_attention_counts_visible_pairs():
    layouts = attention.Layouts.of(shapes.random_pairs([(3, 2, 1)], 10), 1024)
    assert attention.visible_pairs(layouts.examples) == (6 + (15 - 6) + (10 - 6), 15 + 10)
    assert attention.kernels(None, torch.device("cpu")) == {"plain": PlainAttention}


def test_causal_conv_measures_both_kinds_of_layers(capsys):
    causal_conv.main(["--shapes", "2x4x2x6/4", "8/3", "--tokens", "4096", "--pairs", "4"])
    with_heads, alone = json_lines(capsys.readouterr().out)
    assert (with_heads["shape"], alone["shape"]) == ("2x4x2x6/4", "8/3")
    for line in (with_heads, alone):
        assert line["form"] == "plain" and "note" not in line
        assert line["forward_ms"] > 0 and line["train_ms"] > 0
        assert all(0 < line[f"error_{kind}"] < 1e-6 for kind in ("results", "rows", "weight"))  # float32 on a CPU


def test_ccgqa_stands_beside_attention_of_full_width(capsys):
    ccgqa.main(["--shapes", "64/4x2x8/2x3", "64/3x3x4/1x1", "--rows", "96"])
    lines = json_lines(capsys.readouterr().out)
    assert [line["shape"] for line in lines] == ["64/4x2x8/2x3", "64/3x3x4/1x1"]
    for line in lines:
        assert "note" not in line
        assert line["train_x"] == pytest.approx(line["mha_train_ms"] / line["train_ms"], abs=2e-3)
        assert line["mix_ms"] > 0 and "reported_forward_x" not in line
        assert 0 < line["error_results"] < 1e-6 and 0 < line["error_gradients"] < 1e-5  # float32 on a CPU
    asked = {
        text: ccgqa.Shape.parse(text).asked(16384)
        for text in ("2048/4x4x128/2x2", "2048/8x2x128/2x2", "768/12x3x16/3x3")
    }
    assert list(asked.values()) == [
        {"reported_forward_x": 1.7, "reported_backward_x": 1.3, "target_train_x": 2.2},
        {"target_train_x": 1.5},
        {},
    ]
    # By hand: 4 products of 64 x 64 and 4 flops a pair and channel, over those of 32 and 16 channels and what mixes.
    pairs = 96 * 97 // 2
    full, mixing = 8 * 64**2 * 96 + 4 * 64 * pairs, 2 * 48 * (2 + 8 * 3) * 96
    assert lines[0]["flops_x"] == pytest.approx(full / (2 * 64 * (64 + 32) * 96 + mixing + 4 * 32 * pairs), abs=1e-3)


def test_elementwise_compares_every_part(capsys):
    elementwise.main(["--rows", "8", "--repeats", "1", "--forms", "eager", "liger"])
    lines = json_lines(capsys.readouterr().out)
    assert [line["part"] for line in lines[::2]] == list(parts.PARTS)
    for eager, liger in zip(lines[::2], lines[1::2], strict=True):
        assert eager["train_ms"] > 0 and not eager["note"] and "missing" in liger["note"]
        assert max(eager["error_output"], eager["error_gradient"], eager["error_weight"] or 0) < 1e-5
        assert eager["ratio_gradient"] == 1


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # the compiler's own imports
def test_elementwise_compiles_as_the_policy_does(capsys):
    elementwise.main(["--rows", "8", "--repeats", "1", "--parts", "swiglu", "--forms", "eager", "inductor"])
    out = capsys.readouterr().out
    compiled = json_lines(out)[1]
    assert not compiled["note"] and compiled["error_gradient"] < 1e-5 and compiled["ratio_output"] > 0
    assert "forward GB/s" in out


def family(name: str, rows: int) -> parts.Family:
    return parts.Family(shapes.config(name), rows, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "forward_and_backward"),
    [
        ("tiny", {"norm": (4, 6), "add_norm": (12, 14), "swiglu": (6, 10), "qk_norm": (4, 6), "rope": (4, 4)}),
        ("qwen3_1_7b", {"norm": (6, 10), "add_norm": (12, 16), "swiglu": (6, 10), "qk_norm": (6, 8), "rope": (6, 6)}),
        ("smollm2_135m", {"norm": (6, 10), "add_norm": (12, 16), "swiglu": (6, 10), "rope": (4, 4)}),
    ],
)
def test_elementwise_counts_the_bytes_of_its_docstring(name, forward_and_backward):
    family_of = family(name, rows=2)
    assert parts.parts(family_of).keys() == forward_and_backward.keys()
    both = family_of.heads + family_of.key_heads
    hidden, inner = family_of.config.hidden_size, family_of.config.intermediate_size
    width = {"norm": hidden, "add_norm": hidden, "swiglu": inner, "qk_norm": both, "rope": both}
    for part_name, kind in parts.parts(family_of).items():
        part = kind(family_of)
        weights = 4 * sum(weight.numel() for weight in part.parameters())
        angles = 2 * 8 * family_of.width if part_name == "rope" else 0
        forward, backward = (2 * width[part_name] * n for n in forward_and_backward[part_name])
        counted, whole = elementwise.traffic(part, part.inputs())
        assert counted == forward + weights + angles
        assert whole - counted == backward + 2 * weights + angles


TINY_QWEN3 = (transformers.Qwen3Config, 64, 128, 2, 4, 2, 512, {"head_dim": 16, "rope_theta": 10000})


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("tiny", {"post_attention_layernorm": "norm", "self_attn.q_norm": "qk_norm"}),
        ("tiny_qwen3", {"input_layernorm": "norm", "self_attn.q_norm": "qk_norm"}),
    ],
)
def test_parts_take_the_dtypes_of_a_training_step(monkeypatch, name, modules):
    monkeypatch.setitem(shapes.SHAPES, "tiny_qwen3", TINY_QWEN3)
    model, taken, rotated = shapes.build(name, "cpu"), {}, []
    modeling = family(name, 8).modeling
    rotate = modeling.apply_rotary_pos_emb
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda *t: rotated.append([x.dtype for x in t]) or rotate(*t))
    for module in modules:
        model.base_model.layers[0].get_submodule(module).register_forward_hook(
            lambda _, inputs, __, module=module: taken.update({module: inputs[0].dtype})
        )
    Policy.fast(model, torch.bfloat16).hidden_rows(layout.build_pack(shapes.random_pairs([(4, 3, 2)], 512), 64, True))
    given = {part: [x.dtype for x in kind(family(name, 8)).inputs()] for part, kind in parts.PARTS.items()}
    assert taken == {module: given[part][0] for module, part in modules.items()}
    assert rotated[0] == given["rope"]


def test_products_vary_with_the_number_of_rows_or_not(capsys, monkeypatch):
    """Of a product that gives half of the numbers of rows other bits, these are counted, and the largest is named."""

    def halves(rows, weight, bias):
        return rows @ weight.mT + (len(rows) % 256 == 0)

    monkeypatch.setattr(split_k, "product", halves)
    split_k.main(["--shapes", "16x4", "--rows", "1920"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["form"], line["tried"], line["other"], line["largest"]) for line in lines] == [
        ("product", 7, 4, 1792),
        ("with bias", 7, 4, 1792),
    ]


def test_products_add_up_to_a_block(capsys):
    products.main(["--rows", "16", "32", "--warm_s", "0", "--each_s", "0"])
    out = capsys.readouterr().out
    lines = json_lines(out)
    singles = [line for line in lines if line.get("kind") == "forward" and line["number"] == "bfloat16"]
    assert [line["layers"] for line in singles[::2]] == ["q k v o", "gate up", "down", "q+k+v", "gate+up"]
    assert all(line["ms"] > 0 and not line["note"] for line in singles)
    assert {"separate", "joined"} <= {line["block"] for line in lines if "block" in line}
    assert "TFLOP/s" in out


def test_a_block_is_three_products_for_each_layer():
    def line(names: str, kind: str) -> dict:
        return {"layers": names, "out": 10, "in": 10, "kind": kind, "number": "bfloat16", "rows": 5, "ms": 1.0}

    lines = [line(names, kind) for names in ("q k v o", "gate up", "down") for kind in products.KINDS[:3]]
    (block,) = products.blocks([*lines, {**line("down", "weight_gradient_32"), "rows": 6}], [5, 6])
    assert block == {"block": "separate", "rows": 5, "block_ms": 21.0, "block_tflops": 0.0}


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_startup_writes_a_folder_once_and_says_where_its_time_goes(tmp_path, monkeypatch, capsys, cache):
    monkeypatch.setattr(startup, "_SHARD", 50_000)
    arguments = ["--model", "tiny", "--folder", str(tmp_path), *(["--warm"] if cache == "warm" else [])]
    startup.main(arguments)
    lines = json_lines(capsys.readouterr().out)
    assert [line["way"] for line in lines] == ["tuningfork", "from_pretrained"]
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    for line in lines:
        assert line["cache"] == cache and line["bytes"] == sum(shard.stat().st_size for shard in shards)
        assert line["load_gb_s"] > 0 and line["disk_gb_s"] > 0 and line["load_over_disk"] > 0
    assert list(lines[0]["phases"]) == ["device", "weights", "self-check", "head check", "weights digest"]

    written = [shard.stat().st_mtime_ns for shard in shards]
    startup.main([*arguments, "--no-plain"])
    assert [line["way"] for line in json_lines(capsys.readouterr().out)] == ["tuningfork"]
    assert [shard.stat().st_mtime_ns for shard in shards] == written


def test_the_folder_of_startup_is_one_that_transformers_loads(tmp_path):
    startup.write_folder("tiny", tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.dtype == torch.bfloat16


def recorded() -> list[dict]:
    """Lines as `peers` writes them, from results that were measured."""
    trl, _, ours, _ = (json.loads(line) for line in RESULTS.read_text().splitlines())
    lines = [
        {
            "trainer": "tuningfork",
            "settings": "",
            "status": "ok",
            "result": {**ours, "examples_per_step": 64, "hfu": 0.5},
        },
        {"trainer": "trl", "settings": "--bs 16", "status": "ok", "result": trl},
        {"trainer": "trl", "settings": "--bs 8", "status": "failed", "error": ["first", "OutOfMemoryError: all"]},
        {"trainer": "other", "settings": "", "status": "missing", "error": ["not installed: other"]},
    ]
    return [peers.comparable(line, pair_flops=6.5525e12, peak_flops=989e12) for line in lines]


def test_peers_are_counted_by_our_flops():
    ours, trl, failed, _ = recorded()
    assert (ours["pairs_s"], ours["mfu"], ours["examples_per_step"]) == (65.37, 0.4331, 64)
    assert (trl["pairs_s"], trl["mfu"], trl["hfu"], trl["tokens_s"]) == (10.12, 0.067, None, 10518)
    assert trl["examples_per_step"] == 16
    assert "pairs_s" not in failed
    assert peers.flops_of_a_pair(512) == pytest.approx(6.5525e12, rel=1e-4)


def test_the_table_of_peers_names_what_is_missing_and_what_failed():
    text = peers.render(recorded())
    endings = [line.split()[-2:] for line in text.splitlines()[1:5]]
    assert endings == [["6.46", "ok"], ["1.0", "ok"], ["-", "failed"], ["-", "missing"]]
    assert "OutOfMemoryError: all" in text and "not installed: other" in text
    alone = peers.render(recorded()[:1]).splitlines()[1]
    assert alone.split()[-2:] == ["-", "ok"]  # without a peer there is no ratio


def test_a_run_that_fails_shows_its_last_lines_and_one_without_end_is_ended():
    failed = peers.measure(peers.Run("other", ("-c", "import sys; print('so far'); sys.exit('no room')"), ""), 60)
    assert failed["status"] == "failed" and failed["error"] == ["so far", "no room"]
    endless = peers.measure(peers.Run("other", ("-c", "import time; time.sleep(60)"), ""), 0.2)
    assert endless["status"] == "timeout" and endless["process_s"] < 30
    fine = peers.measure(peers.Run("other", ("-c", """print('{"trainer": "other", "pairs_s": 1}')"""), ""), 60)
    assert fine["status"] == "ok" and fine["result"]["pairs_s"] == 1
    missing = peers.measure(peers.Run("other", ("-c", ""), "", needs=("no_such_trainer",)), 60)
    assert missing["status"] == "missing" and "no_such_trainer" in missing["error"][0]


def test_learning_compares_ways_by_the_noise_between_seeds(capsys):
    learning.main(["--seeds", "2"])
    lines = [line for line in json_lines(capsys.readouterr().out) if line.get("bench") == "learning"]
    assert [(line["way"], line["epoch"]) for line in lines] == [("float32", 1), ("float32", 2)]
    assert all(line["noise"] > 0 and line["apart"] == 0 for line in lines)


def test_learning_by_hand():
    truth = np.array([[0.7, 0.1], [0.5, 0.3]])
    [*_, first, last] = learning.compare({"float32": truth, "bfloat16": truth + np.array([0.1, -0.2])})
    assert (first["loss"], first["noise"], first["apart"]) == pytest.approx((0.7, 0.1414, 0.1))
    assert (last["apart"], last["in_noise"]) == pytest.approx((-0.2, -1.414))


def test_scale_has_a_line_for_every_piece_of_host_work(capsys):
    scale.main(["--pairs", "40", "--batch", "8"])
    works = [line["work"] for line in json_lines(capsys.readouterr().out)]
    assert {work.split(":")[0] for work in works} == {"start", "scoring", "ahead", "between"}


def test_scale_makes_the_pairs_it_was_told_to():
    lengths = np.array([[3, 2, 1], [1, 1, 4]])
    pairs = list(scale.many_pairs(lengths))
    assert [[len(pair.prompt_ids), *(len(answer.ids) for answer in pair.answers)] for pair in pairs] == lengths.tolist()
    assert column(pairs, "content").tolist() == column(scale.many_pairs(lengths), "content").tolist()
