"""YAML to plain containers and back, by the scalar rules of YAML 1.2, with the line of every key.

`1e-6` is a float, `yes` and `on` are strings, `010` is ten and dates stay text, unlike in YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dovetail.config.keys import KeyPath, format_path

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_INT = re.compile(r"^[-+]?(?:[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+)$")
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)
       |[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?
       |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_TAG = "tag:yaml.org,2002:"
_RULES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, "~nN"),
    ("merge", re.compile(r"^<<$"), "<"),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads scalars by YAML 1.2's core rules."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute

    def int_(self, node: yaml.ScalarNode) -> int:
        """Decimal whatever the leading zeros; `0x` and `0o` as Python has them."""
        text = str(self.construct_scalar(node)).replace("_", "")
        base = {"0x": 16, "0o": 8}.get(text.lstrip("+-")[:2], 10)
        return int(text, base)

    def float_(self, node: yaml.ScalarNode) -> float:
        """A number, infinity or nan."""
        return float(
            str(self.construct_scalar(node))
            .replace("_", "")
            .lower()
            .replace(".inf", "inf")
            .replace(".nan", "nan")
        )

    def bool_(self, node: yaml.ScalarNode) -> bool:
        """`true` or `false`."""
        return str(self.construct_scalar(node)).lower() == "true"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""


for _name, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
_Loader.add_implicit_resolver(_TAG + "null", _NULL, [""])
_Loader.add_constructor(_TAG + "int", _Loader.int_)
_Loader.add_constructor(_TAG + "float", _Loader.float_)
_Loader.add_constructor(_TAG + "bool", _Loader.bool_)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Single quotes would fold these further line breaks of YAML into spaces.
    if set(text) & set("\r\x85\u2028\u2029"):
        style: str | None = '"'
    else:
        style = "|" if "\n" in text else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_str)


_SCALAR_TAGS = frozenset(_TAG + name for name in ("str", "bool", "int", "float", "null"))


class YamlTextError(ValueError):
    """The text is no YAML, or YAML that a config can't hold. `line` counts from 1."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Plain containers and scalars, and the line (from 1) on which the value of each key path was given.

    Raises:
        YamlTextError: bad syntax, several documents, a key given twice, a key that is no string, a tag of YAML's
            language-specific kind, an alias that holds itself, or containers nested deeper than Python recurses.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[KeyPath, int] = {}
        return _plain(loader, node, (), lines, frozenset()), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlTextError(message, mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise YamlTextError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise YamlTextError("mappings and lists are nested too deep") from error
    finally:
        if loader is not None:
            loader.dispose()


def dump(value: Any) -> str:
    """Block-style YAML in the order given; `parse` reads the same value back."""
    return str(
        yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    )


def _plain(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    open_nodes: frozenset[int],
) -> Any:
    line = node.start_mark.line + 1
    lines[path] = line
    if id(node) in open_nodes:
        raise YamlTextError(f"{format_path(path)} is an alias that holds itself", line)
    inside = open_nodes | {id(node)}
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        children = _children(loader, node, path)
        return {key: _plain(loader, child, (*path, key), lines, inside) for key, child in children}
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [
            _plain(loader, child, (*path, index), lines, inside)
            for index, child in enumerate(node.value)
        ]
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
        return loader.construct_object(node)
    raise YamlTextError(f"the tag {node.tag.replace(_TAG, '!!')} is not allowed in a config", line)


def _children(
    loader: _Loader, node: yaml.MappingNode, path: KeyPath
) -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values, those that `<<` merges in first."""
    first_lines: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _TAG + "merge":
            continue
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a container"
            where = f" below {format_path(path)}" if path else ""
            raise YamlTextError(f"the key {shown}{where} is no string: put it in quotes", line)
        if key in first_lines:
            raise YamlTextError(
                f"the key {format_path((*path, key))} is given twice, first on line {first_lines[key]}",
                line,
            )
        first_lines[key] = line
    loader.flatten_mapping(node)
    merged: dict[str, yaml.Node] = {}
    for key_node, child in node.value:
        merged[str(loader.construct_object(key_node))] = child
    yield from merged.items()
