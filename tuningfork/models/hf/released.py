"""Which tensors in the files of a folder are which of the model's, in families whose folders and classes differ.

transformers knows such maps, too, but it applies them to a whole model in memory, and what it saves is not what it has
read: a convolution in equal parts whatever its parts were, and names of one kind of block in another. So for these
families the map is ours, for all who read or write weights: one process, or many that have a part each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from tuningfork.wording import counted

There = TypeVar("There")
"""A tensor, or where one lies."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Place(NamedTuple):
    """Where in the model a tensor of the files is: under this name, and its rows from `start` up to `end`, or to the
    last."""

    name: str
    start: int = 0
    end: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """What is there in the model's tensor of this name."""
        return whole if self.end is None else whole[self.start : self.end]


@dataclass(frozen=True)
class _Family:
    """What the files of a family have otherwise than its class.

    renamed: (pattern, class's name) of what may stand within a name in the files.
    in_recurrent_blocks: whether only such blocks' tensors have other names when they are published. Files that a
        library has saved may have them elsewhere, too.
    parts: patterns of the tensors that are one in the class, in their order there, and its name.
    left_out: pattern of the tensors that its language model has no place for.
    """

    left_out: str
    renamed: tuple[tuple[str, str], ...] = ()
    in_recurrent_blocks: bool = False
    parts: tuple[str, ...] = ()
    whole: str = ""


_FAMILIES: Mapping[str, _Family] = {
    "olmo_hybrid": _Family(
        left_out=r"^mtp\.",
        renamed=(
            (r"\battention_layer_norm\b", "input_layernorm"),
            (r"\bfeedforward_layer_norm\b", "post_attention_layernorm"),
        ),
        in_recurrent_blocks=True,
        parts=("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
        whole="conv1d.weight",
    ),
    "qwen3_next": _Family(left_out=r"^mtp\."),
    "qwen3_5_text": _Family(left_out=r"^(mtp|model\.visual)\.", renamed=((r"^model\.language_model\.", "model."),)),
}

PARTS_OF_MORE = frozenset({"qwen3_5"})
"""Types of models that hold one of these families' language models beside others, which are left out."""


@dataclass(frozen=True)
class Released:
    """A folder's tensors and a model's.

    names: of each of the model's tensors, by its name there: those in the files that are, one above the other, this.
    cuts: rows of the parts of a tensor that is published in several.
    recurrent: numbers of the layers with a state.
    left_out: names in the files of what is no part of the model.
    missing: names that the files lack of the parts of a tensor, where they hold others of them.
    """

    family: _Family
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cuts: tuple[int, ...] = ()
    recurrent: frozenset[int] = frozenset()
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Any, names: Iterable[str] = ()) -> Released | None:
        """How these tensors of a folder belong to the model of its config; None where they do as the library has it.

        Raises:
            ValueError: two tensors are one of the model's.
        """
        family = _FAMILIES.get(config.model_type)
        if family is None:
            return None
        found: dict[str, dict[int, str]] = {}
        left_out = []
        for name in names:
            if re.search(family.left_out, name):
                left_out.append(name)
                continue
            own, part = _own(family, name)
            before = found.setdefault(own, {}).setdefault(part, name)
            if before != name or (len(found[own]) > 1 and -1 in found[own]):
                raise ValueError(
                    f"the weights hold both {next(iter(found[own].values()))} and {name}, which are one tensor of the "
                    "model; get weights of one kind"
                )
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        cuts = (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim) if family.parts else ()
        kinds = enumerate(config.layer_types)
        return cls(
            family,
            {own: tuple(name for _, name in sorted(parts.items())) for own, parts in found.items()},
            cuts,
            frozenset(layer for layer, kind in kinds if kind == "linear_attention"),
            tuple(left_out),
            tuple(name for own, parts in found.items() for name in _missing(family, own, parts)),
        )

    def joined(self, stored: Mapping[str, There], join: Callable[[list[There]], There]) -> dict[str, There]:
        """What lies in the files by the model's names; `join` puts parts one above the other."""
        return {
            own: stored[names[0]] if len(names) == 1 else join([stored[name] for name in names])
            for own, names in self.names.items()
            if names[0] in stored
        }

    def published(self, names: Iterable[str]) -> dict[str, Place]:
        """Where the tensors of an export's files are in the model, of whose tensors `names` are to be there.

        A tensor that is published in several gets their cuts, whatever cuts the starting folder had; all else has the
        name that it had there, or the model's own.
        """
        found = {}
        for own in names:
            stem = own.removesuffix(self.family.whole)
            if self.family.whole and own.endswith("." + self.family.whole):
                start = 0
                for part, rows in zip(self.family.parts, self.cuts, strict=True):
                    found[stem + part] = Place(own, start, start + rows)
                    start += rows
            else:
                found[self._name(own)] = Place(own)
        return found

    def _name(self, own: str) -> str:
        layer = _LAYER.search(own)
        elsewhere = layer is not None and int(layer[1]) not in self.recurrent
        if self.family.in_recurrent_blocks and elsewhere:
            return own
        return self.names.get(own, (own,))[0]

    def note(self) -> tuple[str, ...]:
        """In words, what of the folder no training and no export has, if there is something."""
        if not self.left_out:
            return ()
        kinds = {re.match(self.family.left_out, name)[0] for name in self.left_out}  # type: ignore[index]
        return (
            f"{counted(len(self.left_out), 'tensor')} of the weights, {' and '.join(f'{k}*' for k in sorted(kinds))}, "
            "belong to no layer of the language model; they are not trained, and an export is without them",
        )


def _own(family: _Family, name: str) -> tuple[str, int]:
    """The model's name of a tensor, and which part of it this is; -1 for all of it."""
    for pattern, instead in family.renamed:
        name = re.sub(pattern, instead, name)
    for number, part in enumerate(family.parts):
        if name.endswith("." + part):
            return name.removesuffix(part) + family.whole, number
    return name, -1


def _missing(family: _Family, own: str, parts: Collection[int]) -> list[str]:
    """The published names of the parts of one of the model's tensors that are not among these."""
    if -1 in parts:
        return []
    stem = own.removesuffix(family.whole)
    return [stem + part for number, part in enumerate(family.parts) if number not in parts]
