"""Escaping of control characters in text that models, reward functions and plugins write."""

from __future__ import annotations

import json

_CONTROLS = [
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    # Embeddings, overrides and isolates of writing direction.
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    # Surrogates, which UTF-8 can't encode.
    *range(0xD800, 0xE000),
]
_ESCAPES = {code: rf"\x{code:02x}" if code < 0x100 else rf"\u{code:04x}" for code in _CONTROLS}
_JSON_ESCAPES = {code: rf"\u{code:04x}" for code in _CONTROLS}


def visible(text: str) -> str:
    r"""Replace control characters by escapes such as `\x1b`.

    Replaced are C0 (but not newline and tab), DEL, C1, overrides of writing direction, and lone surrogates.
    """
    return text.translate(_ESCAPES)


def visible_json(value: object) -> str:
    """Return a value as indented JSON that parses to the same value. Characters that `visible` replaces are written as JSON escapes."""
    return json.dumps(value, indent=2, ensure_ascii=False).translate(_JSON_ESCAPES)
