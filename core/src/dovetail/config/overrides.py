"""`key=value` overrides: `rollout.n=4`, `tracking[1].name=x`, `actor.mini_batch_size=null`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from dovetail.config.keys import KeyPath, parse_path
from dovetail.config.layers import ByIndex, ConfigLayer
from dovetail.config.plain_yaml import YamlTextError, parse
from dovetail.config.problems import ConfigProblem


@attrs.frozen
class NotYaml:
    """Value of an override that is not YAML; only a field whose text is kept as written (`Field.verbatim`) accepts such a value."""

    reason: str


def read_overrides(
    overrides: Sequence[str], rank: int
) -> tuple[list[ConfigLayer], list[ConfigProblem]]:
    """Return one layer for each override, all with the rank `rank`, and the problems of the overrides.

    Values are YAML: `n=4` is a number, `names=[a, b]` a list, `key=null` and `key=` are null.
    """
    layers: list[ConfigLayer] = []
    problems: list[ConfigProblem] = []
    for number, text in enumerate(overrides, start=1):
        name = f"override #{number} '{text}'"
        try:
            sign, path, raw = _split(text)
        except ValueError as error:
            problems.append(ConfigProblem(path=(), text=str(error), origin=name))
            continue
        if sign:
            problems.append(ConfigProblem(path=(), text=_without(sign, text), origin=name))
        if "~" in sign:
            continue
        value: Any
        try:
            value, _ = parse(raw)
        except YamlTextError as error:
            value = NotYaml(f"{error}; {error.hint}")
        tree = _nest(path, value)
        layers.append(ConfigLayer(rank=rank, name=name, tree=tree, raw={path: raw}))
    return layers, problems


def _split(text: str) -> tuple[str, KeyPath, str]:
    """Return the signs before the key (Hydra's `+`, `++`, `~`), the key, and the value's text."""
    key, equals, raw = text.partition("=")
    while equals and key.count('"') % 2:
        more, equals, raw = raw.partition("=")
        key += "=" + more
    if not equals:
        raise ValueError("an override must have the form key=value, such as rollout.n=4")
    key = key.strip()
    bare = key.lstrip("+~")
    return key.removesuffix(bare), parse_path(bare), raw


def _without(sign: str, text: str) -> str:
    null = " (null unsets a value)" if sign[0] == "~" else ""
    return f"the sign {sign[0]!r} before a key has no meaning here; write {text.strip().lstrip('+~')}{null}"


def _nest(path: KeyPath, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = ByIndex({key: value}) if isinstance(key, int) else {key: value}
    nested: dict[str, Any] = value
    return nested
