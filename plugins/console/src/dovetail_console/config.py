"""The config of the console."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class ConsoleConfig(PluginSection):
    """Settings of `console`, which shows progress on the terminal."""

    live: bool | None = None
    """Whether to show a live display (true) or print one line per step (false). Absent: live if the output is a terminal."""
    refresh_per_second: float = attrs.field(default=4.0, validator=attrs.validators.gt(0))
    """Redraws of the live display per second."""
    metrics: tuple[str, ...] = ()
    """Names of metrics to show in addition to the key figures (reward, loss, KL, …), such as `actor/clip_frac`."""
