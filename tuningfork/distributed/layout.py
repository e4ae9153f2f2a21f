"""How the processes of a run are laid out: copies of the model, each spread over some, and matrices split over some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import ConfigError
from tuningfork.wording import counted

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True, slots=True)
class Layout:
    """replicate x shard x tensor processes. Neighbours are in one tensor group, then in one shard group: what
    travels most travels least far."""

    replicate: Annotated[int, Field(ge=1)] = 1
    shard: Annotated[int, Field(ge=1)] = 1
    tensor: Annotated[int, Field(ge=1)] = 1

    @classmethod
    def plan(cls, config: ParallelConfig, ranks: Ranks) -> Layout:
        """The layout that the settings ask for; where they leave it open, each machine has a copy, spread over its
        GPUs: links within a machine are many times faster than those between.

        Raises:
            ConfigError: the numbers do not multiply to that of the processes.
        """
        if ranks.size == 1:  # there is nothing to share out, whatever a recipe for many asks for
            return cls()
        size, tensor = ranks.size, config.tensor
        replicate, shard = config.replicate, config.shard
        if size % tensor == 0:
            rest = size // tensor
            if replicate is None and shard is None:
                nodes, alone = divmod(size, ranks.per_node)
                replicate = nodes if not alone and rest % nodes == 0 else 1
            if replicate is None and shard is not None:
                replicate = rest // shard
            if shard is None and replicate is not None:
                shard = rest // replicate
        if not replicate or not shard or replicate * shard * tensor != size:
            numbers = {name: getattr(config, name) for name in (REPLICATE, SHARD, TENSOR)}
            asked = ", ".join(f"parallel.{name} {number or 'null'}" for name, number in numbers.items())
            raise ConfigError(
                f"{asked} do not share out {counted(size, 'process', 'processes')}: replicate x shard x tensor must "
                f"be {size}. Set those that are to be found out to null, and tensor to a number that divides it."
            )
        return cls(replicate, shard, tensor)

    @property
    def unsplit(self) -> Layout:
        """The same processes and copies, with each product computed by one of them: a copy's weights are spread over
        those that compute together, too."""
        return Layout(self.replicate, self.shard * self.tensor)

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.spread * self.tensor

    @property
    def spread(self) -> int:
        """Processes that train on different examples."""
        return self.replicate * self.shard

    def mesh(self, device: str) -> DeviceMesh:
        """The mesh of all processes, with a dimension for each of the three. All processes must ask for it."""
        return init_device_mesh(
            device, (self.replicate, self.shard, self.tensor), mesh_dim_names=(REPLICATE, SHARD, TENSOR)
        )

    def __str__(self) -> str:
        parts = [
            (self.replicate, "copies of the model"),
            (self.shard, "processes that share a copy's weights, gradients and moments"),
            (self.tensor, "processes that compute each product together"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count > 1) or "one process"


ONE = Layout()
"""Of a run in one process."""
