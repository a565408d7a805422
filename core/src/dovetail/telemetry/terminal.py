"""Text on a terminal: what models and reward functions write is shown, and never carried out by the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from dovetail.telemetry.escapes import visible


class Terminal(Console):
    """rich's Console, which makes every string that it is given visible. A Text is taken as it is."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render as rich does; strings in tables and groups come here too."""
        return super().render_str(visible(text), **options)
