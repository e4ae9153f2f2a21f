"""Settings of training, and of what a run writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuningfork.models.config import ACTIVATION_MEMORY, ACTIVATION_MEMORY_FORMS
from tuningfork.report.sinks import NAMES

if TYPE_CHECKING:
    SinkName = str
else:
    SinkName = Literal[NAMES]

PROMPT = "prompt"
"""What train.group_by is unless it is set."""


@dataclass
class TrainConfig:
    """The optimizer and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 5.0e-7
    """Peak learning rate."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the data; may be a fraction."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Train exactly this many steps instead of `epochs`. Either may be raised on --resume, also once a run has ended:
    its schedule is then that of the new length, from the next step on."""
    eval_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on data.eval, beside those before and after training; null: none between. The step that
    did best keeps its checkpoint, whatever output.keep_last says. No weight depends on it. May change on --resume."""
    best_by: Literal["loss", "accuracy", "margin"] = "loss"
    """By which held-out number a step is the best: the lowest loss, or the highest accuracy or margin; the earliest of
    equals. Needs eval_every."""
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = None
    """Stop behind so many evaluations in a row of which none is better, by best_by, than the best one before them.
    Those that eval_every asks for count. The schedule stays that of all steps. null: no such stop. May change on
    --resume: more, or null, and a run that has stopped goes on as if it had not. Needs eval_every."""
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    """By how much an evaluation must be better to count as better; smaller gains count once they add up to more. May
    change on --resume. Needs early_stopping_patience."""
    examples_per_step: Annotated[int, Field(ge=1)] = 32
    """Batch size in examples, exactly, also of a step that goes on into the next epoch; only the last step of a run by
    epochs may have fewer. How a batch is cut into packs changes nothing but speed, and how the gradients
    of bfloat16 weights are rounded, see gradient_dtype."""
    tokens_per_step: Annotated[int, Field(ge=1)] | None = None
    """Batch size in tokens instead of examples, each example's as metrics.jsonl counts `tokens`. A step is the longest
    run of next examples that have no more together, also on into the next epoch, and at least one example. Where steps
    begin follows from data and seed alone."""
    length_steps: list[list[Annotated[int, Field(ge=1)]]] | None = None
    """Shorter pieces of documents at first: [[steps, tokens], ...], so many steps on pieces of at most so many tokens,
    one line behind the other, each longer than the one before; the rest of max_steps has pieces of data.max_length. A
    step has as many tokens throughout. Each line begins a pass over the documents, cut anew. Needs max_steps,
    tokens_per_step and data.over_length: pieces."""
    order: Literal["shuffled", "grouped"] = "shuffled"
    """Order of the examples, each once an epoch. shuffled: each by itself. grouped: some examples of a group stay
    together, so that a step can hold what begins alike: groups are shuffled, cut into pieces of at most group_most,
    and the pieces shuffled and laid end to end. A step may cut a piece, for it has its exact size all the same."""
    group_by: Annotated[str, Field(min_length=1)] = PROMPT
    """What a group is, with order: grouped. prompt: examples with the same prompt, by its tokens. conversation: those
    whose conversations begin alike, with the same tools and the same messages up to the first answer to a user; of text
    without a template, the same prompt. Else a field of the rows, by the name that data.columns gives it, such as
    conversation_id: rows with the same string, number or truth value, of whatever file. A row that says nothing there
    is a group of its own, and noted."""
    group_most: Annotated[int, Field(ge=1)] = 4
    """Members of a group together at most. More share more, and make a step's examples less independent: where the
    gradients in a group correlate by r, a step of whole pieces has 1 + (group_most - 1) r times the variance. On a
    small model r was about 0 for pairs of a prompt without a common answer and for turns of a conversation, where more
    costs little; 0.22 for pairs against one reference answer, where 4 is 1.7 times; and 0.56 for near-copies, where 2
    is 1.6 times."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps its moments in 8 bits instead of 32: 2 bytes a weight instead of 8. Needs torchao.
    Of weights that are spread over processes it takes float32 ones, and a continued run must spread them over as
    many."""
    gradient_dtype: Literal["weights", "float32"] = "weights"
    """In what the gradients of a step's packs are added up. weights: in each weight's own precision; bfloat16 weights
    (model.weights) round the sum once a pack. float32: without that rounding, for 2 more bytes a bfloat16 weight, 14
    GiB at 7B. Not the default, for a pack's own gradient is rounded more than a sum of tens of packs: on a tiny model
    errors were 3.56 % either way with one pack, and 3.58 % against 3.56 % with 16. May change on --resume."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """Shape of the learning rate after warm-up. linear and cosine fall to min_lr_ratio of the peak; wsd stays at the
    peak up to decay_start and falls from there as cosine does."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of all steps that the learning rate takes to rise from 0 to its peak."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of warm-up, in the place of warmup_ratio."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """What the learning rate falls to, as a share of its peak, just after the last step."""
    decay_start: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Share of all steps after which wsd falls."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; null turns clipping off."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only (no norms, no biases)."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the squared-gradient mean."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep a moving average of the weights: behind each step it is so much of itself, and the rest of the weights;
    0.999 averages about the last 1,000 steps. Evaluations behind a step, the best of them and the exported model are
    the average's; no step depends on it. 4 more bytes a weight. null: none is kept."""
    activation_memory: Annotated[str, Field(pattern=ACTIVATION_MEMORY, description=ACTIVATION_MEMORY_FORMS)] = "none"
    """What of a decoder block is kept for the backward pass. none: everything, the fastest. budget:0.5: half of it, the
    compiler recomputes the cheapest rest (needs model.compile). block: its input, the block is recomputed, about a
    third more compute. offload: the same, with the inputs in host memory. auto: the fastest that fits the GPU, found by
    trying. Log-probs stay the same to the bit; a budget rounds gradients differently. May change on --resume, where
    auto keeps what it chose."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the data order, and of stochastic rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU. May change on --resume; what is computed from there on is rounded differently."""


@dataclass
class OutputConfig:
    """What a run writes, and when."""

    dir: Annotated[str, Field(min_length=1)] = "runs/first"
    """The run folder. An existing one is continued with --resume, otherwise refused; never overwritten."""
    save_every: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept; older ones are removed once a newer one is whole. With train.eval_every the best one stays."""
    save_async: bool | None = None
    """Write checkpoints while training goes on, from a copy of weights and moments in host memory. null: where several
    processes share a run, each of which copies its share; one process takes the time rather than the memory. The files
    are the same to the bit."""
    log_every: Annotated[int, Field(ge=1)] = 1
    """Steps between lines in metrics.jsonl; a line covers all steps since the last one. A checkpoint writes one too,
    and so does an evaluation."""
    stall_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds in which a step, the next pack of an evaluation or a checkpoint has to come; then a line says that the
    run stands still, once, and stalls.txt has what every thread of it is doing, stalls.3.txt that of process 3. 0: no
    watch. Less than parallel.timeout_minutes."""
    nvtx_ranges: bool = False
    """Name the phases of training for a profiler: data, which is what a step waits for, step N with forward, head,
    backward, gradient exchange (of weights on several processes: what has not travelled within the backward pass) and
    optimizer in it, evaluation, checkpoint. nsys shows them as NVTX ranges, torch.profiler as annotations. No bit
    depends on it."""
    sinks: list[SinkName] = field(default_factory=lambda: ["tensorboard"])
    """Where the numbers of metrics.jsonl go besides, or [] for nowhere."""
    export: Literal["last", "best"] = "last"
    """Of which step the model is exported: the last, or the best by train.best_by. May change on --resume, also once a
    run has ended: the model exported before is then kept under the name of its step."""
    export_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the exported model. auto: that of the starting model's weights. Training keeps float32 weights
    unless model.weights says otherwise, and bfloat16 rounds small updates away; float32 keeps all digits."""
