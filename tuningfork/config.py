"""The whole recipe of a run: composes the rooms' own settings. Only cross-room checks live here."""

from __future__ import annotations

from dataclasses import dataclass, field

from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.models.config import ModelConfig
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.reference.config import ReferenceConfig
from tuningfork.train.config import OutputConfig, TrainConfig


@dataclass
class RunConfig:
    """One training run. Every key can be set in the recipe and overridden by a dotted flag."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
