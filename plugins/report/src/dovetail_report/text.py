"""Prompts, messages and responses as text for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping

LONGEST_TEXT = 4000
"""Maximum number of characters of a text that are shown."""


def as_text(value: object) -> str:
    """Return a prompt or a message's content as text.

    Several messages are written with their roles, a single message without; content parts stand one below the other.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        if all("type" in item for item in value):
            return "\n".join(str(item.get("text", f"[{item['type']}]")) for item in value)
        parts = [(item.get("role", ""), as_text(item.get("content"))) for item in value]
        if len(parts) == 1:
            return str(parts[0][1])
        return "\n".join(f"{role}: {content}" for role, content in parts)
    return json.dumps(value, ensure_ascii=False)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """Cut out the middle of a text of more than `longest` characters; the end is kept, since it may hold the answer."""
    cut, tail = len(text) - longest, longest // 4
    if cut <= 0:
        return text
    return f"{text[: longest - tail]} … ({cut} more characters) … {text[-tail:]}"
