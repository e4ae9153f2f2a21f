"""The benchmarks run, on tiny shapes, and say what they mean to say; how fast anything is stands in no test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import attention, head, memory, peers, shapes, step
from bench.device_time import DeviceProfile, category
from bench.output import table
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.models.flops import FlopCounter

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


def test_measure_refuses_what_has_no_steady_step():
    with pytest.raises(ValueError, match="warms up"):
        step.measure("tiny", pairs=4, examples_per_step=2, epochs=1)


def test_hardware_flops_add_a_forward_pass_of_the_blocks_only():
    examples = shapes.yardstick(8)
    for mode in ("block", "offload"):
        assert step.recomputed_share(mode, FlopCounter(1000, 0, ()), examples) == pytest.approx(1 / 3)
        assert step.recomputed_share(mode, FlopCounter(0, 1000, ()), examples) == 0
    assert step.recomputed_share("none", FlopCounter(1000, 0, ()), examples) == 0
    assert step.recomputed_share("budget:0.5", FlopCounter(1000, 0, ()), examples) is None


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


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64>", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("_query_gradient", "attention"),
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


def test_annotations_and_the_host_count_for_nothing():
    def event(name, us, annotation=False, where=DeviceType.CUDA):
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, is_user_annotation=annotation, device_type=where, time_range=span)

    profile = DeviceProfile()
    profile.add(
        [
            event("nvjet_a", 3000.0),
            event("nvjet_a", 1000.0),
            event("Optimizer.step#AdamW.step", 9000.0, annotation=True),
            event("Optimizer.step#AdamW.step", 9000.0),
            event("aten::mm", 9000.0, where=DeviceType.CPU),
        ],
        on_device=True,
    )
    assert profile.summary(steps=2, wall_seconds=0.01)["device_ms"] == 2.0
    assert profile.by_category(2)["matrix products"] == 2.0
    report = profile.report(2, 0.01, {"device": "card"})
    assert "device 2.0 ms of 5.0 ms wall (40.0 %)" in report
    assert [line.split()[:3] for line in report.splitlines() if line.endswith("nvjet_a")] == [["2.0", "1.0", "2,000.0"]]


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


def test_attention_counts_visible_pairs():
    layouts = attention.Layouts.of(shapes.random_pairs([(3, 2, 1)], 10), 1024)
    assert layouts.visible_pairs() == (6 + (15 - 6) + (10 - 6), 15 + 10)
    assert attention.kernels(None, torch.device("cpu")) == {"plain": PlainAttention}


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
    assert [run.settings for run in peers.runs(quick=True, pairs=512)] == [peers.OURS[0], peers.BEST_TRL]
