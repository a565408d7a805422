r"""Helpers that find the last `\boxed{…}` of a text."""

from __future__ import annotations

_OPEN = "\\boxed{"


def last_boxed_only_string(string: str) -> str | None:
    """Return the last LaTeX command `boxed` of a text, with its braces; None if there is none, or its brace is not closed."""
    start = string.rfind(_OPEN)
    depth = 0
    for place in range(start, len(string)) if start >= 0 else ():
        depth += (string[place] == "{") - (string[place] == "}")
        if string[place] == "}" and not depth:
            return string[start : place + 1]
    return None


def remove_boxed(s: str) -> str:
    """Return the content of the braces of a LaTeX command `boxed`.

    Raises:
        AssertionError: the text is not a single such command.
    """
    assert s.startswith(_OPEN), f"{s!r} does not start with {_OPEN}"
    assert s.endswith("}"), f"{s!r} does not end with a closing brace"
    return s[len(_OPEN) : -1]
