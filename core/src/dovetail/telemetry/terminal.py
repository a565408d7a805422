"""Text on a terminal: what models and reward functions write is shown, and never carried out by the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

_CONTROLS = [
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    # Embeddings, overrides and isolates of writing direction.
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
_ESCAPES = {code: rf"\x{code:02x}" if code < 0x100 else rf"\u{code:04x}" for code in _CONTROLS}


def visible(text: str) -> str:
    r"""Write control characters as escapes such as `\x1b`: C0 but newline and tab, DEL, C1, and overrides of writing direction."""
    return text.translate(_ESCAPES)


class Terminal(Console):
    """rich's Console, which makes every string that it is given visible. A Text is taken as it is."""

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does; strings in tables and groups come here too."""
        return super().render_str(visible(text), **options)
