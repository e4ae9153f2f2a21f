"""Settings of other trainers: each is met by the setting that stands for it here, or by why there is none."""

from __future__ import annotations

import re
from typing import Literal, get_args

import pytest

from tuningfork.errors import ConfigError
from tuningfork.objective.kinds import OBJECTIVES
from tuningfork.recipe import hints
from tuningfork.recipe.dialect import parse_scalar
from tuningfork.recipe.load import from_yaml
from tuningfork.recipe.parse import parse_flags
from tuningfork.recipe.run_config import SETTINGS
from tuningfork.recipe.validate import unknown, validate

SECTIONS = {key.partition(".")[0] for key in SETTINGS}
NAMES = sorted(hints.all_hints())
ENTRIES = list({id(entry): entry for entry in hints.all_hints().values()}.values())


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
        assert entry.values in (hints.SAME, hints.FILES) and entry.setting
    else:
        for ours in entry.values:
            validate({entry.setting: parse_scalar(ours)}, SETTINGS, "")
    theirs = [value for group in (*dict(entry.values or ()).values(), entry.unsupported, *entry.answers.values())
              for value in group] if not isinstance(entry.values, str) else []  # fmt: skip
    assert len(theirs) == len(set(theirs)) and all(value == value.lower().replace("-", "_") for value in theirs)
    assert entry.setting or not entry.unsupported
    assert entry.step in ("", hints.BATCH, hints.ACCUMULATION, hints.WHOLE)


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
        parse_flags([f"--{name}", "1"], SETTINGS)
    setting = hints.all_hints()[name].setting
    assert f"here it is --{setting}" in str(caught.value) or not setting


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("per_device_train_batch_size: 4", "here it is train.examples_per_step (the pairs of a whole step, so"),
        ("gradient_accumulation_steps: 8", "here it is train.examples_per_step (the pairs of a whole step, so"),
        ("datasets: [{path: chef.jsonl, type: x}]", "here it is data.train: chef.jsonl (a file"),
        ("datasets: [{path: a/b.jsonl}, {path: ./c}]", "here it is data.train: [a/b.jsonl, ./c] (a file"),
        ("datasets: [{path: owner/name}]", "here it is data.train (a file"),
        ("train_file: chef.jsonl", "here it is data.train: chef.jsonl (a file"),
        ("batch_size: 64", "here it is train.examples_per_step: 64 ("),
        ("learning_rate: 1e-6", "here it is train.learning_rate: 1e-06."),
        ("weight_decay: 0.1", "here it is train.weight_decay: 0.1."),
        ("warmup_ratio: 0.1", "here it is train.warmup_ratio: 0.1."),
        ("train: {beta: 0.2}", "here it is objective.beta: 0.2."),
        ("train: {max_length: 2}", "here it is data.max_length: 2."),
        ("label_smoothing: 0.1", "here it is objective.label_smoothing: 0.1."),
        ("seed: 1", "here it is train.seed: 1."),
        ("bf16: true", "here it is model.dtype: bfloat16 ("),
        ("bf16: false", "here it is model.dtype: float32 ("),
        ("fp16: true", "here it is model.dtype: float16 (auto computes in bfloat16 on a GPU, which has the speed"),
        ("model: {torch_dtype: torch.bfloat16}", "here it is model.dtype: bfloat16 ("),
        ("gradient_checkpointing: true", "here it is train.activation_memory: block ("),
        ("lora_r: 8", "not supported yet: adapters and quantized weights"),
        ("finetuning_type: full", "none is needed: all weights are trained."),
        ("finetuning_type: lora", "not supported yet: adapters and quantized weights"),
        ("num_train_epochs: 3", "here it is train.epochs: 3."),
        ("warmup_steps: 10", "here it is train.warmup_steps: 10."),
        ("lr_scheduler_type: warmup_stable_decay", "here it is train.schedule: wsd ("),
        ("min_lr_ratio: 0.1", "here it is train.min_lr_ratio: 0.1."),
        ("tokens_per_batch: 65536", "here it is train.tokens_per_step: 65536 (the tokens of a whole step)."),
        ("lr_scheduler_type: constant_with_warmup", "here it is train.schedule: constant ("),
        ("optim: paged_adamw_8bit", "here it is train.optimizer: adamw_8bit ("),
        ("optim: lion", "not supported: lion; here it is train.optimizer (adamw, or adamw_8bit"),
        ("loss_type: sigmoid", "here it is objective.name: dpo ("),
        ("loss_type: ppo", "not supported: ppo; here it is objective.name (which loss; objective.sft_weight adds"),
        ("loss_type: sft", "here it is objective.name: sft (which loss"),
        ("stage: sft", "here it is objective.name: sft (which loss"),
        (
            "stage: pt",
            "here it is objective.name: lm (which loss; lm reads rows of text, with data.template: none)",
        ),
        ("stage: kto", "not supported: kto; here it is objective.name"),
        ("token_level_loss: false", "here it is objective.mean_over: examples (of objective.name: sft)"),
        ("loss_agg_mode: token-mean", "here it is objective.mean_over: tokens (of objective.name: sft)"),
        ("reduce_loss: sum", "not supported: sum; here it is objective.mean_over"),
        ("dataset_text_field: text", "here it is data.columns (a mapping of the file's names"),
        ("loss_type: [sigmoid, sft]", "here it is objective.name (which loss; objective.sft_weight adds"),
        ("rpo_alpha: 0.2", "here it is objective.sft_weight: 0.2 ("),
        ("precompute_ref_log_probs: true", "none is needed: the reference is always scored once"),
        ("ref_model: other", "none is needed: the reference is the starting model"),
        ("cutoff_len: 4096", "here it is data.max_length: 4096 ("),
        ("max_prompt_length: 512", "here it is data.max_length (the tokens of prompt and answer together;"),
        ("val_size: 0.1", "here it is data.eval (no part of the training data is split off"),
        ("eval_steps: 50", "here it is train.eval_every: 50 ("),
        ("save_total_limit: 3", "here it is output.keep_last: 3."),
        ("report_to: wandb", "none is needed: output.dir has metrics.jsonl and TensorBoard files"),
        ("report_to: tensorboard", "here it is output.sinks: [tensorboard] (a list of what gets the numbers"),
        ("report_to: all", "none is needed: TensorBoard files are written"),
        ("report_to: none", "here it is output.sinks with the value []"),
        ("report_to: [wandb]", "here it is output.sinks (a list of what gets the numbers"),
        ("use_wandb: true", "none is needed: output.dir has metrics.jsonl and TensorBoard files"),
        ("resume_from_checkpoint: x", "continue the run in output.dir with the option --resume"),
        ("attn_implementation: flash_attention_2", "none is needed: attention over packs has kernels of its own"),
        ("packing: true", "none is needed: examples are always packed"),
        ("group_by_length: true", "none is needed: it puts examples of like length together"),
        ("train_sampling_strategy: random", "here it is train.order: shuffled (shuffled, or grouped, which"),
        ("train_sampling_strategy: group_by_length", "none is needed: packs pad almost nothing"),
        ("train_sampling_strategy: sequential", "not supported: sequential; here it is train.order ("),
        ("deepspeed: ds.json", "not supported yet: training runs in one process"),
        ("torch_compile: true", "here it is model.compile: on ("),
    ],
)
def test_what_is_said(given, instead):
    assert f" is not a setting; {instead}" in said(given)


def test_a_section_of_another_trainer_is_named_once():
    text = said("optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\nlora: {r: 8, alpha: 16}\ntrain: {sede: 1}")
    assert [line.partition(" is not")[0] for line in text.splitlines()] == [
        "r.yaml: lora",
        "r.yaml: optimizer",
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
            parse_flags(given.split(), SETTINGS)
        assert str(caught.value).startswith(instead)


@pytest.mark.parametrize(
    ("given", "said_of_it"),
    [
        ("objective.name sigmoid", f": here it is dpo; allowed: one of {', '.join(OBJECTIVES)}."),
        ("objective.name DPO", ": here it is dpo; allowed"),
        ("objective.name sigmoid-norm", ": here it is dpo_norm; allowed"),
        ("objective.name cdpo", ": wrong labels are objective.label_smoothing, of objective.name: dpo; allowed"),
        ("train.optimizer adamw_torch", ": here it is adamw; allowed: one of adamw, adamw_8bit."),
        ("train.optimizer adamw_torch_fused", ": here it is adamw; allowed"),
        ("train.optimizer paged_adamw_32bit", ": here it is adamw; allowed"),
        ("train.optimizer paged_adamw_8bit", ": here it is adamw_8bit; allowed"),
        ("train.optimizer adamw_bnb_8bit", ": here it is adamw_8bit; allowed"),
        ("train.optimizer adam", ": train.optimizer: adamw with train.weight_decay: 0, its default, is Adam; allowed"),
        ("train.schedule constant_with_warmup", ": here it is constant; allowed"),
        ("train.schedule cosine_with_restarts", ": not supported; allowed: one of linear, cosine, constant, wsd."),
        ("model.dtype bf16", ": here it is bfloat16; allowed"),
        ("model.dtype torch.float32", ": here it is float32; allowed"),
        ("model.dtype fp16", ": here it is float16; allowed"),
        ("model.dtype half", ": here it is float16; allowed"),
        ("model.weights bf16", ": here it is bfloat16; allowed"),
        ("output.export_dtype fp32", ": here it is float32; allowed"),
        ("train.device cuda:0", ": here it is cuda; allowed"),
        ("data.template chatml", ": the tokenizer's own template is used; data.template: file.jinja gives another;"),
        ("data.template llama3", ": the tokenizer's own template is used; data.template: file.jinja gives another;"),
        ("data.template zzz", "; allowed: chat (the tokenizer's own template), none, or the path of a file"),
    ],
)
def test_a_value_of_another_trainer_is_met_by_ours_in_a_recipe_and_as_a_flag(given, said_of_it):
    key, value = given.split()
    section, _, name = key.partition(".")
    text = said(f"{section}: {{{name}: '{value}'}}")
    assert text.startswith(f"r.yaml: {key} is the text '{value}'{said_of_it}") and "Did you mean" not in text
    with pytest.raises(ConfigError) as caught:
        parse_flags([f"--{key}", value], SETTINGS)
    assert str(caught.value) == text.replace("r.yaml", "command line")


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.unsupported], ids=lambda entry: entry.setting)
def test_an_unsupported_value_is_said_to_be_so_and_no_other_method_is_suggested(entry):
    section, _, name = entry.setting.partition(".")
    ours = get_args(SETTINGS[entry.setting])  # a value that has become ours may still be in the table
    assert not set(ours) >= set(entry.unsupported)
    for value in set(entry.unsupported) - set(ours):
        text = said(f"{section}: {{{name}: '{value}'}}")
        assert text.startswith(f"r.yaml: {entry.setting} is the text '{value}': not supported; allowed: one of ")
        assert "Did you mean" not in text
        assert f" is not a setting; not supported: {value}; " in said(f"{entry.names.split()[0]}: '{value}'")


@pytest.mark.parametrize("value", ["ppo", "cdpo", "their_own"])
def test_a_value_that_our_setting_takes_is_ours_whatever_the_table_says_of_it(value):
    """So an objective, or a schedule, is added in one place."""
    settings = {**SETTINGS, "objective.name": Literal["dpo", value]}
    with pytest.raises(ConfigError) as caught:
        parse_flags([f"--loss_type={value}"], settings)
    assert f"--loss_type is not a setting; here it is --objective.name {value} (which loss;" in str(caught.value)
    assert parse_flags([f"--objective.name={value}"], settings) == {"objective.name": value}


@pytest.mark.parametrize("value", ["wandb", "their_own"])
def test_a_sink_that_there_is_is_ours_whatever_the_table_says_of_it(value):
    settings = {**SETTINGS, "output.sinks": list[Literal["tensorboard", value]]}
    told = unknown("report_to", settings, value=value).said
    assert told.startswith(f"report_to is not a setting; here it is output.sinks: [{value}] (a list of what gets")
    assert parse_flags([f"--output.sinks=[{value}]"], settings) == {"output.sinks": [value]}


def test_an_entry_of_a_list_is_met_by_what_stands_here_for_it():
    for given, expected in {
        "[tensorboard, wandb]": r"has the text 'wandb': none is needed: .*; allowed: a list with each entry one of ",
        "[tensorbord]": r"has the text 'tensorbord'; allowed: a list with .*\. Did you mean tensorboard\?$",
        "[TensorBoard]": r"has the text 'TensorBoard'; allowed: a list with .*\. Did you mean tensorboard\?$",
        "[tensorboard, 3]": r"has 3; allowed: a list with each entry one of ",
        "7": r"is 7; allowed: a list with each entry one of ",
    }.items():
        with pytest.raises(ConfigError, match=rf"^r\.yaml: output\.sinks {expected}"):
            from_yaml(f"output: {{sinks: {given}}}", "r.yaml")


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("train.optimizer", "adamw_8bits", "adamw_8bit"),
        ("train.optimizer", "adamw_4bits", None),  # another number is another thing
        ("train.schedule", "cosin", "cosine"),
        ("objective.name", "dpo_nrm", "dpo_norm"),
        ("objective.name", "xdpo", None),  # a letter away from dpo, and perhaps somebody's method
        ("objective.name", "margin", None),
        ("data.over_length", "truncate_answer", "truncate_answers"),
    ],
)
def test_only_a_small_misspelling_is_taken_for_one(key, value, meant):
    section, _, name = key.partition(".")
    text = said(f"{section}: {{{name}: {value}}}")
    assert (f"Did you mean {meant}?" in text) if meant else ("Did you mean" not in text and "here it is" not in text)


def test_the_batch_of_a_step_is_computed_where_a_recipe_gives_both_parts():
    for batch in ("batch_size: 4", "per_device_train_batch_size: 4", "train: {micro_batch_size: 4}"):
        lines = said(f"{batch}\ngradient_accumulation_steps: 8").splitlines()
        assert sum(line.count("here it is train.examples_per_step: 32 (4 x 8 on each device; ") for line in lines) == (
            len(lines)
        )
    (line,) = said("per_device_train_batch_size: 4\ngradient_accumulation_steps: 8").splitlines()
    assert "per_device_train_batch_size and gradient_accumulation_steps are not settings; here it is" in line
    for alone in ("per_device_train_batch_size: 4", "gradient_accumulation_steps: 8"):
        assert "here it is train.examples_per_step (the pairs of a whole step" in said(alone)
        assert "their product" in said(alone)
    given = "train_batch_size: 64\ntrain_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 8"
    shown = re.findall(r"here it is train\.examples_per_step(\S*)(?: (\d+))?", said(given))
    assert shown == [(":", "64"), ("", "")]
    assert "examples_per_step (" in said("batch_size: 4\ngradient_accumulation_steps: auto").splitlines()[1]
    with pytest.raises(ConfigError, match=r"here it is --train\.examples_per_step 32 \(4 x 8 on each device;"):
        parse_flags(["--batch-size=4", "--gradient_accumulation_steps", "8"], SETTINGS)


def test_what_is_not_supported_is_said_first_and_a_recipe_of_another_trainer_is_said_whole():
    known = [name for name, entry in hints.all_hints().items() if entry.setting][:30]
    text = said("\n".join([*(f"{name}: 1" for name in known), "lora_r: 8", "deepspeed: ds.json", "zzz: 1"]))
    lines = text.splitlines()
    named = [name for line in lines for name in re.split(", | and ", re.split(" (?:is|are) not ", line[8:])[0])]
    assert sorted(named) == sorted(["lora_r", "deepspeed", *known, "zzz"])
    assert (named[:2], named[-1]) == (["lora_r", "deepspeed"], "zzz")
    lines = said("\n".join(f"{name}: 1" for name in NAMES)).splitlines()
    assert len(lines) == 41 and lines[-1] == "r.yaml: and so on."
    lines = said("\n".join([*(f"{name}: 1" for name in known), *(f"zz{i}: 1" for i in range(31))])).splitlines()
    assert len(lines) == 21 and lines[-1] == "r.yaml: and so on; this may be no recipe at all."
