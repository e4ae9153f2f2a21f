"""The settings of a run: one record of the rooms' own settings, which any room may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.distributed.config import ParallelConfig
from tuningfork.models.config import ModelConfig
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.recipe import dialect
from tuningfork.reference.config import ReferenceConfig
from tuningfork.train.config import OutputConfig, TrainConfig


@dataclass
class RunConfig:
    """Settings of a run. Each stands in the recipe (train: {seed: 3}) or is a flag (--train.seed 3); a flag wins.
    Relative paths start at the current directory, wherever the recipe lies."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunConfig:
        """The settings with these values, dotted key -> value; the defaults stand where a key is not given."""
        config = cls()
        for section in fields(config):
            room = getattr(config, section.name)
            for setting in fields(room):
                key = f"{section.name}.{setting.name}"
                setattr(room, setting.name, values.get(key, getattr(room, setting.name)))
        return config

    def values(self) -> dict[str, Any]:
        """Dotted key -> value, in the order of the recipe."""
        return {f"{section}.{name}": value for section, room in asdict(self).items() for name, value in room.items()}

    def differing(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Dotted key -> (value here, value in the other), for the settings in which they differ."""
        ours, theirs = self.values(), other.values()
        return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}

    def to_yaml(self) -> str:
        """Every setting as a recipe; loading it gives an equal config."""
        return dialect.to_text(asdict(self))


SETTINGS: dict[str, Any] = {
    f"{section}.{name}": hint
    for section, room in get_type_hints(RunConfig).items()
    for name, hint in get_type_hints(room, include_extras=True).items()
}
"""Dotted key -> type with its constraints, for every setting there is."""
