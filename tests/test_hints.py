"""Settings of other trainers: each is met by the setting that stands for it here, or by why there is none."""

from __future__ import annotations

import re

import pytest

from tuningfork import hints, recipe
from tuningfork.config import SETTINGS, from_yaml
from tuningfork.errors import ConfigError

SECTIONS = {key.partition(".")[0] for key in SETTINGS}
NAMES = sorted(hints.table())
ENTRIES = list({id(entry): entry for entry in hints.table().values()}.values())


def said(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, "r.yaml")
    return str(caught.value)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.names.split()[0])
def test_an_entry_names_only_settings_that_there_are_with_values_that_they_take(entry):
    named = {entry.setting} - {""}
    for text in (entry.words, *entry.answers):
        named |= {key for key in re.findall(r"\b([a-z]+\.\w+)\b", text) if key.partition(".")[0] in SECTIONS}
    assert named - {"output.dir"} <= {*SETTINGS}
    assert entry.setting or entry.words
    if isinstance(entry.values, str):
        assert entry.values == hints.SAME and entry.setting
    else:
        for ours in entry.values:
            recipe.validate({entry.setting: recipe.parse_scalar(ours)}, SETTINGS, "")


def test_no_name_stands_twice_or_is_ours():
    names = [name for entry in ENTRIES for name in entry.names.split()]
    assert sorted(names) == NAMES
    assert not set(names) & SECTIONS
    assert all(name == name.lower() and "-" not in name for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_met_at_the_top_of_a_recipe_in_a_section_and_as_a_flag(name):
    top, within = said(f"{name}: 1"), said(f"train: {{{name}: 1}}")
    assert top.startswith(f"r.yaml: {name} is not a setting; ") and "did you mean" not in top
    if f"train.{name}" not in SETTINGS:
        assert within == top.replace(name, f"train.{name}", 1)
    with pytest.raises(ConfigError, match=f"^--{name} is not a setting; ") as caught:
        recipe.parse_flags([f"--{name}", "1"], SETTINGS)
    setting = hints.table()[name].setting
    assert f"here it is --{setting}" in str(caught.value) or not setting


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("per_device_train_batch_size: 4", "here it is train.examples_per_step (the pairs of a whole step;"),
        ("gradient_accumulation_steps: 8", "here it is train.examples_per_step (the pairs of a whole step;"),
        ("batch_size: 64", "here it is train.examples_per_step: 64 ("),
        ("learning_rate: 1e-6", "did you mean train.learning_rate?"),
        ("weight_decay: 0.1", "did you mean train.weight_decay?"),
        ("warmup_ratio: 0.1", "did you mean train.warmup_ratio?"),
        ("train: {beta: 0.2}", "did you mean objective.beta?"),
        ("train: {max_length: 2}", "did you mean data.max_length?"),
        ("label_smoothing: 0.1", "did you mean objective.label_smoothing?"),
        ("seed: 1", "did you mean train.seed?"),
        ("bf16: true", "here it is model.dtype: bfloat16 ("),
        ("bf16: false", "here it is model.dtype: float32 ("),
        ("fp16: true", "float16 is not supported: bfloat16 has its speed"),
        ("model: {torch_dtype: torch.bfloat16}", "here it is model.dtype: bfloat16 ("),
        ("gradient_checkpointing: true", "here it is train.activation_memory: block ("),
        ("lora_r: 8", "adapters and quantized weights are not supported yet"),
        ("finetuning_type: full", "none is needed: all weights are trained."),
        ("finetuning_type: lora", "adapters and quantized weights are not supported yet"),
        ("num_train_epochs: 3", "here it is train.epochs: 3."),
        ("warmup_steps: 10", "here it is train.warmup_ratio (the share of all steps"),
        ("lr_scheduler_type: constant_with_warmup", "here it is train.schedule: constant ("),
        ("optim: paged_adamw_8bit", "here it is train.optimizer: adamw_8bit ("),
        ("optim: lion", "here it is train.optimizer (adamw, or adamw_8bit"),
        ("loss_type: sigmoid", "here it is objective.name: dpo ("),
        ("loss_type: hinge", "here it is objective.name (dpo, dpo_norm, ipo, ipo_sum and simpo"),
        ("loss_type: [sigmoid, sft]", "here it is objective.name (dpo, dpo_norm, ipo, ipo_sum and simpo"),
        ("rpo_alpha: 0.2", "here it is objective.sft_weight: 0.2 ("),
        ("precompute_ref_log_probs: true", "none is needed: the reference is always scored once"),
        ("ref_model: other", "none is needed: the reference is the starting model"),
        ("cutoff_len: 4096", "here it is data.max_length: 4096 ("),
        ("max_prompt_length: 512", "here it is data.max_length (the tokens of prompt and answer together;"),
        ("val_size: 0.1", "here it is data.eval (no part of the training data is split off"),
        ("eval_steps: 50", "here it is train.eval_every: 50 ("),
        ("save_total_limit: 3", "here it is output.keep_last: 3."),
        ("report_to: wandb", "none is needed: output.dir has metrics.jsonl and TensorBoard files"),
        ("resume_from_checkpoint: x", "continue the run in output.dir with the option --resume"),
        ("attn_implementation: flash_attention_2", "none is needed: attention over packs has kernels of its own"),
        ("packing: true", "none is needed: examples are always packed"),
        ("deepspeed: ds.json", "not supported yet: training runs in one process"),
        ("torch_compile: true", "here it is model.compile: on ("),
    ],
)
def test_what_is_said(given, instead):
    assert f" is not a setting; {instead}" in said(given)


def test_a_section_of_another_trainer_is_named_once():
    text = said("optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\nlora: {r: 8, alpha: 16}\ntrain: {sede: 1}")
    assert [line.partition(" is not")[0] for line in text.splitlines()] == [
        "r.yaml: optimizer",
        "r.yaml: lora",
        "r.yaml: train.sede",
    ]


def test_a_flag_is_met_with_a_flag_also_without_its_value_and_with_hyphens():
    for given, instead in {
        "--num-train-epochs 3": "--num-train-epochs is not a setting; here it is --train.epochs 3.",
        "--num_train_epochs=3": "--num_train_epochs is not a setting; here it is --train.epochs 3.",
        "--bf16": "--bf16 is not a setting; here it is --model.dtype (auto computes in bfloat16 on a GPU).",
        "--bf16 --train.seed 1": "--bf16 is not a setting; here it is --model.dtype (auto computes",
    }.items():
        with pytest.raises(ConfigError) as caught:
            recipe.parse_flags(given.split(), SETTINGS)
        assert str(caught.value).startswith(instead)
