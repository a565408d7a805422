"""What the transports `in_process` and `disk` are configured by."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class InProcessTransportConfig(PluginSection):
    """Weights handed over within one process."""

    channel: str | None = None
    """Name of a mailbox that every transport of this process with the same name shares; absent: one of its own."""
    verify: bool = True
    """Prove by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for an update."""


@attrs.frozen(kw_only=True)
class DiskTransportConfig(PluginSection):
    """Weights through a directory that trainers and rollouts share."""

    directory: str | None = None
    """Where updates are written; absent: `weights` in the run directory."""
    keep: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Updates to keep, newest first."""
    verify: bool = True
    """Prove by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for an update."""
