"""What our benches need of TRL's trainers: data that is tokens already, and the seconds of each step."""

from __future__ import annotations

import time
from typing import Any

import torch


def prepared(trainer: type) -> Any:
    """A trainer that takes its data as it is."""

    class Prepared(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *others: Any, **more: Any) -> Any:
            return dataset

    return Prepared


def clock(times: list[float]) -> Any:
    """A callback that appends the seconds of each step to `times`, the device's work included."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *others: Any, **more: Any) -> None:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *others: Any, **more: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.begun)

    return Clock()


def tokenizer() -> Any:
    """A tokenizer that trainers ask for and do not use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **marks)
