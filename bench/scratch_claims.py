"""What two public reports say of their models, claim by claim, what we ask of ourselves, and what stands for each row:
see bench.scratch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SPREAD_MOST = 1.35  # times: beyond it tokens/s fall with the length


class Claim(NamedTuple):
    """A row of a report: what it says, what we ask of ourselves, and the unit of what is measured here."""

    row: str
    report: str
    target: str
    unit: str


CLAIMS = {
    "spread": Claim("N3", "15", f"<= {SPREAD_MOST}", "x"),
    "twin": Claim("N3", "-", "NSA >= 1.1 at 32k", "x"),
    "made": Claim("N7", "'dominates'", "<= 2 for m7c-125m", "s"),
    "moved": Claim("N7", "'dominates'", "<= 1 for m7c-125m", "s"),
    "start": Claim("N7", "'dominates'", "first step <= 90 in all", "s"),
    "memory": Claim("H5", "0.07 of a micro model", "block <= 0.15", "of none"),
    "speed": Claim("H5", "0.7", "block >= 0.75", "of none"),
    "bits": Claim("H5", "difference 0", "block, on a CPU", ""),
    "loss error": Claim("H3", "1.9e-6", "<= 1e-6", "relative"),
    "gradient error": Claim("H3", "7.5e-9 absolute", "<= 1e-6", "relative"),
    "logits": Claim("H3", "4 to 8", ">= 8", "x"),
    "head time": Claim("H9", "-", ">= 1", "x"),
    "elementwise": Claim("H2", "1.3 to 2", ">= 2", "x"),
    "layer": Claim("H18", "1.3 to 1.7", ">= 1.5", "x"),
    "moments": Claim("H10", "-50 %", "2.03 beside 8", "bytes a weight"),
    "learning": Claim("H10", "-", "as of adamw", "nats"),
    "compiled": Claim("H8", "-", "-", "tokens/s"),
    "tuned": Claim("H8", "-", "-", "x"),
    "graph": Claim("H12", "1.2", ">= 1.05 to be kept", "x"),
    "graph bits": Claim("H12", "-", "True", ""),
    "tf32": Claim("H1", "1.1 to 1.3", "-", "x"),
    "tf32 loss": Claim("H1", "-", "beside that without", "nats"),
}
RATES = {
    "m7c-125m": Claim("N3", "260 at 512 and 17 at 2,048 of two models; 9,400 mended", ">= 100,000", "tokens/s"),
    "nsa-toy": Claim("N4", "260 to 410", ">= 10,000 at 128 on 2 CPU cores", "tokens/s"),
    "hydra-100m": Claim("H17", "41,300 on an RTX 5090; readme 30,000", ">= 150,000", "tokens/s"),
    "hydra-220m": Claim("H17", "-", ">= 80,000", "tokens/s"),
}
"""Of models by the names of their recipes."""
NO_CLAIM = Claim("-", "-", "-", "tokens/s")


def line(claim: Claim, what: str, model: str, ours: Any, **rest: Any) -> dict[str, Any]:
    """A line of results: what was measured of a model, beside the claim that it stands for."""
    return {"bench": "scratch", "what": what, "model": model, "ours": ours, **claim._asdict(), "note": "", **rest}


class Row(NamedTuple):
    """What stands for a row of a report: its words in short, and tests, commands, files of raw lines, or entries of
    docs/log.md, each by words that it has, `log: words`."""

    says: str
    proofs: tuple[str, ...]


_SCRATCH = "python -m bench.scratch --parts"
_BY_BLOCK = "bench/results/2026-11-30-h200-scratch-by-block.jsonl"
_HEAD = "bench/results/2026-11-28-h100-head.jsonl"
_FLOAT16 = ("tests/end_to_end/test_float16.py", "tests/train/test_loss_scale.py")
ROWS = {
    "N1": Row(
        "three branches and a gate",
        (
            "python -m bench.needle",
            "bench/results/2026-11-30-cpu-needle.jsonl",
            "tests/kernels/test_plain_nsa.py",
            "tests/models/nsa/test_nsa.py::test_no_later_token_moves_a_bit_of_an_earlier_row",
            "tests/gpu/test_nsa.py",
        ),
    ),
    "N2": Row("selection 169 times faster", ("python -m bench.nsa", "bench/results/2026-11-30-h200-nsa-2.jsonl")),
    "N3": Row(
        "260 tok/s at 512, 17 at 2,048",
        (f"{_SCRATCH} lengths", _BY_BLOCK),
    ),
    "N4": Row(
        "260 to 410 tok/s of a toy",
        (f"{_SCRATCH} lengths --models nsa-toy --lengths 128 --tokens 1024",
         "bench/results/2026-11-30-cpu-nsa-toy.jsonl"),
    ),
    "N5": Row(
        "production: 17 tok/s, later 9,400",
        (f"{_SCRATCH} lengths --models m7c-125m --lengths 2048",
         _BY_BLOCK),
    ),
    "N6": Row("4,096 tokens timed out", (f"{_SCRATCH} lengths --models m7c-125m --lengths 4096",)),
    "N7": Row("initialisation dominates", (f"{_SCRATCH} start", _BY_BLOCK)),
    "N8": Row(
        "two GPUs by DDP",
        ("tests/distributed/test_sharding.py::test_steps_over_documents_are_those_of_one_process",),
    ),
    "N9": Row(
        "gradients in bfloat16",
        ("tests/distributed/test_narrow.py", "bench/results/2026-11-30-cpu-scratch-sums-moments.jsonl",
         "log: Moments in 8 bits, sums in bfloat16, on text"),
    ),
    "N10": Row(
        "checkpointing off under DDP",
        ("tests/models/nsa/test_nsa.py::test_what_is_kept_of_a_block_changes_no_gradient", f"{_SCRATCH} activations"),
    ),
    "N11": Row(
        "batch of 1 on two ranks crashed",
        ("tests/distributed/test_plan.py::test_a_rank_without_examples_runs_empty_packs",),
    ),
    "N12": Row(
        "accumulation suspected",
        ("tests/train/test_step.py::test_a_batch_cut_in_any_way_gives_the_same_step",
         "tests/objective/test_lm.py::test_a_step_and_an_evaluation_are_means_over_all_tokens_whatever_the_packs"),
    ),
    "N13": Row(
        "profile by phase",
        ("python -m bench.step --model m7c-125m --profile profile.txt",
         "tests/bench/test_bench.py::test_every_kernel_of_ours_is_work_of_a_named_kind",
         "tests/end_to_end/test_ranges.py"),
    ),
    "N14": Row("memory at initialisation", ("tests/train/setup/test_activation_memory.py",)),
    "N15": Row(
        "older forms, search for a length",
        ("tests/train/checks/test_kernel_check.py",
         "tests/bench/test_scratch.py::test_a_sweep_over_lengths_finds_quadratic_work_and_says_where"),
    ),
    "N16": Row(
        "watchdog, stack dump, halt file",
        ("tests/train/test_stall.py",
         "tests/end_to_end/test_lm.py::test_a_step_or_an_evaluation_that_stands_still_is_said_and_where",
         "tests/end_to_end/test_resume.py"),
    ),
    "N17": Row("buckets of 25 to 100 MB", ()),
    "N18": Row("fp16 with a scaler", _FLOAT16),
    "N19": Row(
        "unknown flags passed unseen",
        ("tests/end_to_end/test_bad_input.py::test_no_command_passes_over_a_setting_that_there_is_not",),
    ),
    "N20": Row(
        "byte tokenizer, random data",
        ("tests/models/hf/test_initial.py::test_ids_are_the_bytes_and_every_text_comes_back",
         "tests/train/test_lm_step.py::test_random_bytes_stay_at_the_logarithm_of_256"),
    ),
    "N21": Row("cosine, warm-up, clip, decay", ("tests/train/test_optimizer.py",)),
    "N22": Row(
        "gate health, selection counters",
        ("tests/models/mixers/test_nsa.py::test_what_is_noted_are_the_gates_and_keys_of_its_tokens",
         "tests/train/test_gates.py"),
    ),
    "H1": Row("TF32", (f"{_SCRATCH} tf32", "tests/end_to_end/test_tf32.py", "log: TF32 for float32 products")),
    "H2": Row(
        "fused norm, SwiGLU, QK-norm",
        (f"{_SCRATCH} elementwise", "bench/results/2026-11-28-h100-elementwise.jsonl",
         "tests/kernels/test_ccgqa.py::test_gradients_grow_and_shrink_with_what_comes_in_and_nothing_is_clamped"),
    ),
    "H3": Row(
        "chunked cross-entropy",
        (f"{_SCRATCH} head", "tests/models/test_head.py", "tests/train/test_lm_step.py"),
    ),
    "H4": Row("chunks of 4,096", (_HEAD,)),
    "H5": Row(
        "checkpointing changes nothing",
        (f"{_SCRATCH} activations", "tests/models/test_activations.py::test_a_mode_changes_no_bit"),
    ),
    "H6": Row(
        "asynchronous copies",
        ("tests/data/packing/test_loader.py::test_the_next_item_is_made_in_a_thread_while_the_one_before_is_used",),
    ),
    "H7": Row("flash attention", ("python -m bench.attention", "tests/gpu/test_attention.py")),
    "H8": Row("whole model by max-autotune", (f"{_SCRATCH} compile --models hydra-100m",)),
    "H9": Row("fused linear and cross-entropy", (f"{_SCRATCH} head", _HEAD)),
    "H10": Row(
        "moments in 8 bits",
        (f"{_SCRATCH} moments", "bench/results/2026-11-30-cpu-scratch-sums-moments.jsonl",
         "tests/train/test_optimizer.py::test_8_bit_adamw_keeps_updates_below_the_spacing_of_bfloat16_on_average",
         "log: Moments in 8 bits, sums in bfloat16, on text"),
    ),
    "H11": Row("fp16 with a scaler", _FLOAT16),
    "H12": Row(
        "CUDA graphs",
        (f"{_SCRATCH} graphs --models hydra-100m m7c-125m", "bench/results/2026-12-01-h200-scratch-graphs.jsonl",
         "log: device is busy for 98.4 % of a step's wall time"),
    ),
    "H13": Row("tensor parallelism", ("tests/distributed/test_tensor.py",)),
    "H14": Row("quick start, memory watch", ("tests/test_scratch_recipes.py",)),
    "H15": Row(
        "WSD, lengths that grow, best-of",
        ("tests/train/test_optimizer.py::test_wsd_by_hand",
         "tests/end_to_end/test_lm.py"
         "::test_pieces_grow_by_step_and_a_run_killed_among_short_ones_goes_on_to_the_bit",
         "tests/train/test_early_stop.py",
         "tests/end_to_end/test_early_stop.py",
         "tests/end_to_end/test_average.py",
         "tests/distributed/test_checkpoint.py"
         "::test_averages_are_spread_as_weights_are_and_stand_in_for_them"),
    ),
    "H16": Row(
        "adaptive depth, experts",
        ("tests/models/ccgqa/test_modeling.py::test_recursions_begin_as_the_same_mlp_and_offsets_are_learned",),
    ),
    "H17": Row("100M at 30k and 41.3k tok/s", (f"{_SCRATCH} lengths --models hydra-100m hydra-220m",)),
    "H18": Row(
        "1.7 times multi-head attention",
        ("python -m bench.ccgqa", "bench/results/2026-11-30-h200-ccgqa-2.jsonl",
         "tests/models/ccgqa/test_modeling.py::test_attention_is_that_of_zaya_with_the_same_weights"),
    ),
}  # fmt: skip
"""All rows of both reports, by the numbers that docs/from_scratch.md has, where each is told in full."""
LEFT_OUT = "nothing to set; see docs/from_scratch.md"


def unmeasured(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of which these lines have no number, each with its proofs, one a line."""
    numbered = {line["row"] for line in lines if line["ours"] is not None}
    return [
        {"row": row, "says": says, "proof": proof} if number == 0 else {"row": "", "says": "", "proof": proof}
        for row, (says, proofs) in ROWS.items()
        if row not in numbered
        for number, proof in enumerate(proofs or (LEFT_OUT,))
    ]
