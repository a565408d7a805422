"""The config of the console."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class ConsoleConfig(PluginSection):
    """Progress on the terminal."""

    live: bool | None = None
    """A live display (true) or one plain line a step (false); absent: live where the output is a terminal."""
    refresh_per_second: float = attrs.field(default=4.0, validator=attrs.validators.gt(0))
    """How often the live display is drawn."""
    metrics: tuple[str, ...] = ()
    """Further metrics to show, by name, such as `actor/clip_frac`."""
