"""Config classes of the transports `in_process` and `disk`."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class InProcessTransportConfig(PluginSection):
    """Weights handed over within one process."""

    channel: str | None = None
    """Name of a mailbox that all transports of this process with the same `channel` share; absent: a private mailbox."""
    verify: bool = True
    """Verify by digests that every tensor arrived as it was sent."""
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
    """Verify by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for an update."""
