"""The YAML that recipes are written in: text -> values, and back.

It is YAML 1.2's core: `5e-7` is a number, only `true` and `false` are booleans (`on` and `no` are text), and a key that
stands twice is an error. An anchor (&) may be repeated by its aliases (*) as far as the whole stays small: a few lines
of aliases of aliases stand for more values than any memory holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tuningfork.wording import escaped

MOST_VALUES = 20_000  # in one text, with those that aliases repeat; only a list of very many files comes near
MOST_LEVELS = 20  # of lists and mappings in each other; settings have three

_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]{1,4000}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class DialectError(Exception):
    """Text that is not YAML as it is read here. It says the line, as far as that is known."""


class TooMuch(yaml.MarkedYAMLError):
    """More values, or levels of them, than any recipe has."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 core scalars, no key twice, and bounds."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  pyyaml's own name

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = self._values = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in each node that is whole, itself included

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        repeats = self.check_event(yaml.AliasEvent)
        before = self._values
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise TooMuch(problem=f"lists and mappings lie in each other {MOST_LEVELS} times", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if repeats and node not in self._sizes:
            raise TooMuch(problem="an alias (*) stands within what it repeats; write it out", problem_mark=mark)
        self._values += self._sizes[node] if repeats else 1
        self._sizes.setdefault(node, self._values - before)
        if self._values > MOST_VALUES:
            why = ", with those that aliases (*) repeat; write out what is meant" if repeats else ""
            raise TooMuch(problem=f"more than {MOST_VALUES:,} values{why}", problem_mark=mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:  # from a tag that is none
            problem = f"{' '.join(str(error).split())}, which does not fit {node.tag}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # a tag may say so of what is none
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value == "<<" and key.style is None:
                problem = "a merge key (<<), which YAML 1.2 does not have; write the settings out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in first_line:
                problem = f"{key.value} is given twice (first in line {first_line[key.value]}); keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first_line[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)

    def scalar(self, text: str) -> Any:
        """The value of one bare scalar."""
        return self.construct_object(yaml.ScalarNode(self.resolve(yaml.ScalarNode, text, (True, False)), text))


class _Dumper(yaml.SafeDumper):
    """Quotes any text that YAML 1.1 *or* our loader would read as something else."""


def _float(loader: _Loader, node: yaml.Node) -> float:
    """Without pyyaml's numbers to the base 60, whose digits have no end."""
    return float(re.sub(r"\.(?=inf|nan)", "", str(loader.construct_scalar(node)).lower()))


_TAG = "tag:yaml.org,2002:"
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"[-+]?[0-9]{1,4000}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_TAG + "int", lambda loader, node: int(loader.construct_scalar(node)))  # pyyaml: 010 is 8
_Loader.add_constructor(_TAG + "float", _float)
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')
)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def load(text: str) -> Any:
    """The value that a YAML text stands for; None for an empty one. Raises DialectError, with TooMuch as its cause
    where the text is YAML and more than a recipe can be."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DialectError(f"{where}{', '.join(filter(None, (error.context, error.problem)))}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = ord(text[error.position])
        raise DialectError(
            f"line {line}: the character U+{code:04X}, which no YAML text has. Is this UTF-16, or no text at all?"
        ) from error


def parse_scalar(text: str) -> Any:
    """One value as it would stand in a recipe: ``"5e-7"`` -> 5e-07, ``"null"`` -> None, ``"chat"`` -> "chat"."""
    return _Loader("").scalar(text)


def to_text(values: Mapping[str, Any]) -> str:
    """YAML that `load` reads back exactly, floats to the last bit."""
    text = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return escaped(text)  # only strings between double quotes have such characters, by our own representer


def as_written(value: Any) -> str:
    """One value as YAML writes it, on one line if it is a scalar."""
    return str(yaml.dump(value, Dumper=_Dumper)).removesuffix("...\n").strip()
