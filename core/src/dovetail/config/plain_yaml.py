"""YAML to plain containers and back, by the scalar rules of YAML 1.2, with the line of every key.

`1e-6` is a float, `yes` and `on` are strings, `010` is ten and dates stay text, unlike in YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from dovetail.config.keys import MAX_DEPTH, KeyPath, format_path

_TAG = "tag:yaml.org,2002:"
_FLOAT = (
    r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RULES = (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(?:[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", "~|null|Null|NULL|", "~nN"),
    ("merge", "<<", "<"),
)
"""Each tag's name, the pattern of its scalars, and the characters that such scalars begin with."""
_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 16 if "x" in text else 8 if "o" in text else 10),
    "float": lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
}
_MAX_VALUES = 100_000
"""Maximum number of values in a text after its aliases are expanded: ten lines of aliases can stand for billions of values."""
_QUOTES = "values that contain `: `, `#`, `{` or `[` need quotes"
_ALIKE = "give keys of one level, and entries of one list, the same indentation, and write `key: value` in the line before"
_HINTS = (
    ("another document", "a config is one document: remove the line `---`"),
    ("<document start>", "begin every section at the left margin, and remove a line `...`"),
    ("while parsing a flow", "close the `{` or `[` that opens on line %d, with commas between its entries; or quote the text"),
    ("but found '}'", "remove the `}`, or quote the text"),
    ("but found ']'", "remove the `]`, or quote the text"),
    ("but found '<scalar>'", "put quotes around the whole value; in single quotes, write '' for one quote"),
    ("<block end>", _ALIKE),
    ("end of stream", "close the quote that opens on line %d"),
    ("escape character", "put the text in single quotes, in which a backslash has no special meaning"),
    ("undefined alias", "quote the value: `*` begins the name of an alias"),
    ("a block scalar", "begin the text in the line after `|` or `>`, or quote it"),
    ("could not find expected ':'", "line %d has no `:`; write `key: value`"),
    ("unacceptable character", "remove the character"),
)  # fmt: skip
"""Pairs (text, fix): the fix of an error whose message by PyYAML contains the text. %d stands for the line where the wrong part begins."""


class YamlTextError(ValueError):
    """The text is not YAML, or YAML that a config can't hold; `line` counts from 1, `hint` is the fix."""

    def __init__(self, message: str, line: int | None = None, hint: str = _QUOTES) -> None:
        super().__init__(message)
        self.line = line
        self.hint = hint


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader with YAML 1.2's core rules for scalars, which records the line of every value."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[KeyPath, int] = {}
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        """Compose the next node; raise a YamlTextError if it is nested too deep, since PyYAML would need minutes to scan such a text."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep(self.peek_event().start_mark.line + 1)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain(
        self, node: yaml.Node, path: KeyPath = (), above: frozenset[int] = frozenset()
    ) -> Any:
        """Return the value of a node as plain containers; `above` are the ids of the nodes that enclose it."""
        line = self.lines[path] = node.start_mark.line + 1
        inside = above | {id(node)}
        if id(node) in above:
            raise YamlTextError(
                f"{format_path(path)} is an alias that contains itself",
                line,
                "write out the value in place of the alias",
            )
        if len(path) > MAX_DEPTH:
            raise _too_deep(line)
        if len(self.lines) > _MAX_VALUES:
            raise YamlTextError(
                f"the text holds more than {_MAX_VALUES:,} values once its aliases are expanded",
                line,
                "replace aliases of aliases by the values that are needed",
            )
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            pairs = self._pairs(node, path)
            return {key: self.plain(child, (*path, key), inside) for key, child in pairs.items()}
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.plain(each, (*path, i), inside) for i, each in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and tag in _SCALARS:
            try:
                return _SCALARS[tag](node.value)
            except ValueError as error:
                raise YamlTextError(
                    f"the value of {format_path(path)} is not a valid {tag}: {error}", line
                ) from None
        shown = node.tag.replace(_TAG, "!!")
        raise YamlTextError(
            f"the tag {shown} is not allowed in a config", line, "write a plain value without a tag"
        )

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, yaml.Node]:
        """Return the value node of each key of a mapping; keys that `<<` merges in come first.

        Raises:
            YamlTextError: a key is not a string, or is given twice.
        """
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                continue
            if key_node.tag != _TAG + "str":
                scalar = isinstance(key_node, yaml.ScalarNode)
                where = f" below {format_path(path)}" if path else ""
                if not scalar:
                    raise YamlTextError(
                        f"a key{where} is a mapping or a list; expected text",
                        line,
                        "put a key that begins with `{` or `[` in quotes",
                    )
                raise YamlTextError(
                    f"the key {key_node.value}{where} is not a string",
                    line,
                    'put it in quotes, such as `"1":`',
                )
            if key_node.value in first_lines:
                key = format_path((*path, key_node.value))
                first = first_lines[key_node.value]
                raise YamlTextError(
                    f"the key {key} is given twice, first on line {first}",
                    line,
                    "keep one of the two, with everything below it",
                )
            first_lines[key_node.value] = line
        self.flatten_mapping(node)
        return {key_node.value: child for key_node, child in node.value}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the keys that `<<` merges in before the mapping's own, each key once."""
        super().flatten_mapping(node)
        pairs = {str(key_node.value): (key_node, child) for key_node, child in node.value}
        node.value = list(pairs.values())


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper that quotes every string that YAML 1.1 or 1.2 would read as something else."""


for _name, _pattern, _first in _RULES:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), [*_first])
_Loader.add_implicit_resolver(_TAG + "null", re.compile("^$"), [""])


_QUOTED = set("\r\x85\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that need double quotes. The first four are line breaks of YAML, which single quotes would fold into spaces. The rest change
the writing direction, which `config show` escapes: YAML reads escapes in double quotes only."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quoted = '"' if set(text) & _QUOTED else None
    return dumper.represent_scalar(
        _TAG + "str", text, style=quoted or ("|" if "\n" in text else None)
    )


_Dumper.add_representer(str, _represent_str)


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the plain containers and scalars that a YAML text describes, and the line (from 1) of each key path.

    Raises:
        YamlTextError: the syntax is bad, or YAML is used that a config can't hold, such as several documents, duplicate keys, or more than
            100 levels.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None, {}) if node is None else (loader.plain(node), loader.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        if "found character '\\t'" in str(error.problem):
            message = "a tab is used where YAML allows only spaces"
            raise YamlTextError(message, line, "indent with spaces") from error
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlTextError(message, line, _hint(message, error, text)) from error
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise YamlTextError(message, hint=_hint(message)) from error


def _hint(message: str, error: yaml.MarkedYAMLError | None = None, text: str = "") -> str:
    if error is not None and "mapping values" in message:
        mark = error.problem_mark
        before = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)[mark.line][: mark.column]
        return _QUOTES if ": " in before else _ALIKE
    begin = error and (error.context_mark or error.problem_mark)
    hint = next((hint for words, hint in _HINTS if words in message), _QUOTES)
    return hint.replace("%d", str(begin.line + 1)) if begin else hint


def _too_deep(line: int) -> YamlTextError:
    return YamlTextError(
        f"mappings and lists are nested too deep: more than {MAX_DEPTH} levels",
        line,
        "remove levels: sections nest only a few levels deep",
    )


def dump(value: object) -> str:
    """Return a value as block-style YAML, with keys in the given order; `parse` restores the value."""
    return str(
        yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    )
