"""Families of models that are ours and not transformers': to be imported before a config or a model is looked up.

Importing this module makes them known to `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. The files of each need
torch and transformers alone. An exported model carries copies of them, and names them in its config.json (`auto_map`),
so that plain transformers loads it with `trust_remote_code=True`. Here such a model is known by its type: what a folder
names, or holds, is never run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tuningfork.models import nsa
from tuningfork.models.ccgqa import modeling_ccgqa
from tuningfork.models.nsa.sequences_nsa import NsaSequences


class Family(NamedTuple):
    """A family's classes, by the names of the library's that find them."""

    config: Any  # AutoConfig
    backbone: Any  # AutoModel
    model: Any  # AutoModelForCausalLM
    beside: tuple[Any, ...] = ()  # classes in other files, which these import

    @property
    def files(self) -> list[Path]:
        """Those that an export carries: where the classes are written."""
        return sorted({Path(inspect.getfile(kind)) for kind in (*self[:3], *self.beside)})

    @property
    def auto_map(self) -> dict[str, str]:
        """What config.json says of the files, to transformers where it knows nothing of us."""
        names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
        written = (f"{Path(inspect.getfile(kind)).stem}.{kind.__name__}" for kind in self[:3])
        return dict(zip(names, written, strict=True))


_ALL = (
    Family(modeling_ccgqa.CcgqaConfig, modeling_ccgqa.CcgqaModel, modeling_ccgqa.CcgqaForCausalLM),
    Family(nsa.NsaConfig, nsa.NsaModel, nsa.NsaForCausalLM, beside=(NsaSequences,)),
)
FAMILIES: Mapping[str, Family] = {family.config.model_type: family for family in _ALL}
"""By the type of the model, as config.json names it."""

for _type, _family in FAMILIES.items():
    AutoConfig.register(_type, _family.config, exist_ok=True)
    AutoModel.register(_family.config, _family.backbone, exist_ok=True)
    AutoModelForCausalLM.register(_family.config, _family.model, exist_ok=True)
