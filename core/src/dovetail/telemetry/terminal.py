"""Text on a terminal: control characters from models and reward functions are shown, not executed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from dovetail.telemetry.escapes import visible


class Terminal(Console):
    """rich's Console with control characters of every string made visible. A Text is printed unchanged."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render as rich does, with control characters made visible; also called for strings in tables and groups."""
        return super().render_str(visible(text), **options)
