"""Job files: YAML 1.2 or JSON.

A text stays as it is written. YAML's core schema alone decides what is a number, ``true``, ``false`` or ``null``:
``yes``, ``NO``, ``12:30``, ``1_000`` and ``2024-01-02`` are texts. In a job's rows an answer such as ``010``, ``0.50``
or ``True`` would be a number or a boolean that is written differently from the row: it is refused and must be quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from rookery.errors import UserError, short, single_line
from rookery.spec import values

MOST_BYTES = 64 << 20
"""Of one file: beyond it the file is no job, or a device that has no end."""

MOST_REPEATED = 16 << 20
"""Characters that aliases of one file may repeat: they are written out when a job is sent."""

VALUE_CHARACTERS = 16
"""Characters that each repeated value counts for besides its text: an empty list needs memory and time too."""

ROWS = frozenset({("environment", "rows"), ("environment", "eval_rows")})
"""Where values are compared with texts of the policy."""

_LONG_NUMBER = re.compile(rb"[0-9][0-9.]{16}|[eE]-3[0-9]{2}")
"""Digits that a float may not hold, in JSON."""

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_NAMES = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
"""Patterns of plain scalars by tag, the first one counts: the core schema of YAML 1.2 (its section 10.3.2), and merge
keys."""


class _JobLoader(yaml.SafeLoader):
    """YAML with the core schema, whose keys are texts as they are written, each given once."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 (PyYAML declares it so)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TAG + "str"
                if key.value in seen:
                    given = short(single_line(key.value))
                    raise UserError(f"line {key.start_mark.line + 1}: {given} is given twice; keep one of them")
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> str:
        """The text of a scalar; two escapes such as ``\\ud83d\\ude00`` are one character, as in JSON."""
        text: str = super().construct_scalar(node)
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)

    def number(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


_TAGS = {
    yaml.ScalarNode: frozenset(_TAG + name for name in (*_NAMES, "str")),
    yaml.SequenceNode: frozenset({_TAG + "seq"}),
    yaml.MappingNode: frozenset({_TAG + "map"}),
}
"""The tags that a node may have: those of the core schema."""

for _name, _pattern in _NAMES.items():
    _JobLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), None)
_JobLoader.add_constructor(_TAG + "int", _JobLoader.integer)
_JobLoader.add_constructor(_TAG + "float", _JobLoader.number)


def read_job(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON job file. Raises :class:`UserError` for anything else."""
    return read_mapping(path, "job", "name, base_model, environment and stop")


def read_mapping(path: Path, kind: str, needed: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises :class:`UserError` for anything else. ``kind``: of file, ``needed``:
    the fields that each has, for its line."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"has more than {MOST_BYTES >> 20} MB; put rows into a JSONL file")
        data = _load(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a {kind} file") from None
    except (UserError, values.ValueRefused) as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; a {kind} has a few levels") from None
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}: {_mistake(error)}") from None
    except ReaderError as error:
        found = f"character #x{error.character:04x} at position {error.position + 1}: {error.reason}"
        raise UserError(f"{path}: is neither YAML nor JSON ({found})") from None
    except ValueError as error:  # text that is not UTF-8, or an endless number
        raise UserError(f"{path}: is neither YAML nor JSON ({single_line(str(error))})") from None
    if data is None:
        raise UserError(f"{path}: the file is empty; a {kind} needs at least {needed}")
    if not isinstance(data, dict):
        first = ", ".join(needed.replace(" and", ",").split(", ")[:2])
        raise UserError(f"{path}: holds {type(data).__name__}, not a mapping of fields ({first}, …)")
    return data


def _mistake(error: yaml.MarkedYAMLError) -> str:
    """A line with the position of a mistake and, where the parser names it, the beginning of the part that it ends."""
    position = _position(error.problem_mark or error.context_mark)
    part = error.context or ""
    if part and error.context_mark is not None and error.problem_mark is not None:
        part += f" from {_position(error.context_mark)}"
    reason = ": ".join(single_line(one) for one in (part, error.problem or "") if one)
    return f"{position}: is neither YAML nor JSON ({reason})"


def _position(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "at its end"


def _load(content: bytes) -> Any:
    """The value in a JSON or YAML text; JSON is read as JSON, whose numbers and escapes YAML reads differently."""
    text = content.decode("utf-8-sig")
    try:
        return decode_job(text.encode())
    except json.JSONDecodeError:
        pass
    loader = _JobLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_aliases(node)
        for scalar, in_rows in _plain_scalars(node):
            _check(scalar, loader, in_rows)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def decode_job(content: bytes) -> Any:
    """The value in the JSON of a job. Raises as :func:`~rookery.spec.values.decode` does, and also for a number in its
    rows that would lose digits."""
    value = values.decode(content)
    if _LONG_NUMBER.search(content):
        written = values.decode_written(content)
        for path in sorted(ROWS):
            part = written
            for name in path:
                part = part.get(name) if isinstance(part, dict) else None
            for problem in values.lost_digits(part, ".".join(path)):
                raise values.ValueRefused(problem)
    return value


def _check_aliases(root: yaml.Node) -> None:
    """Raises :class:`UserError` for a value that contains itself, and for aliases that repeat too much. Looks at each
    node once, however often it is repeated."""
    sizes: dict[int, int] = {}
    """Characters of each complete node, those that aliases repeat in it included."""
    above: set[int] = set()
    left: list[tuple[yaml.Node, bool]] = [(root, False)]
    written = 0
    """Characters of all nodes that were looked at."""
    while left:
        node, complete = left.pop()
        inner = _inner(node)
        if complete:
            above.remove(id(node))
            sizes[id(node)] = _characters(node) + sum(sizes[id(one)] for one in inner)
            if sizes[id(node)] - written > MOST_REPEATED:
                raise UserError(
                    f"line {node.start_mark.line + 1}: aliases repeat more than {MOST_REPEATED >> 20} MB; put rows into"
                    " a JSONL file"
                )
        elif id(node) in above:
            raise UserError(f"line {node.start_mark.line + 1}: the value contains an alias of itself; leave that out")
        elif id(node) not in sizes:
            written += _characters(node)
            above.add(id(node))
            left += [(node, True), *((one, False) for one in inner)]


def _inner(node: yaml.Node) -> list[yaml.Node]:
    """The nodes in a list or a mapping."""
    if isinstance(node, yaml.MappingNode):
        return list(chain.from_iterable(node.value))
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _characters(node: yaml.Node) -> int:
    """The characters of the node alone."""
    return VALUE_CHARACTERS + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)


def _plain_scalars(root: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, bool]]:
    """The scalars without quotes, and whether each is in the job's rows."""
    left: list[tuple[yaml.Node, tuple[str, ...]]] = [(root, ())]
    while left:
        node, path = left.pop()
        _check_tag(node)
        if isinstance(node, yaml.SequenceNode):
            left += [(entry, path) for entry in node.value]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    left.append((key, path))
                deeper = len(path) < 2 and isinstance(key, yaml.ScalarNode) and key.tag != _MERGE
                left.append((value, (*path, key.value) if deeper else path))
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            yield node, path in ROWS


def _check_tag(node: yaml.Node) -> None:
    """Raises :class:`UserError` for a tag, such as ``!!set``, that the core schema does not have, or whose pattern the
    value does not have."""
    name, written = node.tag.removeprefix(_TAG), short(single_line(node.tag.replace(_TAG, "!!")))
    if node.tag not in _TAGS[type(node)]:
        raise UserError(f"line {node.start_mark.line + 1}: the tag {written} has no meaning here; leave it out")
    if isinstance(node, yaml.ScalarNode) and name in _NAMES and not re.fullmatch(_NAMES[name], node.value):
        raise UserError(
            f"line {node.start_mark.line + 1}: {short(single_line(node.value))} is no {written}; correct it"
        )


def _check(node: yaml.ScalarNode, loader: _JobLoader, in_rows: bool) -> None:
    """Raises :class:`UserError` for a scalar that would lose how it is written where that counts."""
    kind, written = node.tag.removeprefix(_TAG), node.value
    line = f"line {node.start_mark.line + 1}: {short(written) or 'a field without a value'}"
    if kind == "int" and written.lstrip("+-").startswith("0") and written.lstrip("+-0").isdigit():
        raise UserError(f"{line}: a number does not begin with 0; drop it, or quote it: '{short(written)}'")
    if in_rows and kind in ("null", "bool", "int", "float"):
        read = loader.construct_object(node)
        if (becomes := json.dumps(read)) != written:
            quoted = f"'{short(written)}'"
            raise UserError(f"{line} would become {short(becomes)} in this row; quote it: {quoted}")
