"""Problems of a config, and one error for a list of problems."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import attrs

from dovetail.config.keys import ABSENT, KeyPath, format_path
from dovetail.errors import ConfigError

_MOST = 200
"""Maximum number of problems that an error lists."""


@attrs.frozen(kw_only=True)
class ConfigProblem:
    """One problem of a config."""

    path: KeyPath
    """Path of the wrong key; empty if the problem concerns no single key."""
    text: str
    """Description of the problem, with the allowed values or the nearest name, and the fix."""
    value: Any = attrs.field(default=ABSENT, eq=False)
    """The offending value."""
    origin: str | None = None
    """The layer that gave the value."""
    touches: tuple[KeyPath, ...] = ()
    """Paths of the other keys that `path` contradicts, such as those of sizes that do not fit each other."""

    def __str__(self) -> str:
        if not self.path:
            return f"{self.origin}: {self.text}" if self.origin else self.text
        value = "" if self.value is ABSENT else f" = {show_value(self.value)}"
        origin = f" ({self.origin})" if self.origin else ""
        return f"{format_path(self.path)}{value}{origin}: {self.text}"


def config_error(source: str, problems: Iterable[ConfigProblem]) -> ConfigError:
    """Return one error that lists every problem once, in the order found; a long list ends with a count of further ones."""
    sentences = tuple(dict.fromkeys(str(problem) for problem in problems))
    count = "1 problem" if len(sentences) == 1 else f"{len(sentences)} problems"
    listed = "\n".join("  " + text.replace("\n", "\n    ") for text in sentences[:_MOST])
    if len(sentences) > _MOST:
        listed += f"\n  … and {len(sentences) - _MOST} more: fix these and check again"
    error = ConfigError(f"{source}: {count} in the config\n{listed}", problems=sentences)
    error.lists_problems = True
    return error


def show_value(value: object, limit: int = 80) -> str:
    """Return a value in YAML's flow style, shortened to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
