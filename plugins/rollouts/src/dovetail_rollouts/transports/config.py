"""Config classes of the transports `in_process` and `disk`."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class InProcessTransportConfig(PluginSection):
    """Hands weights over within one process."""

    channel: str | None = None
    """Name of a mailbox that all transports with this `channel` in one process share; absent: a private mailbox."""
    verify: bool = True
    """Whether to verify by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for an update."""


@attrs.frozen(kw_only=True)
class DiskTransportConfig(PluginSection):
    """Sends weights through a directory that trainers and rollouts share."""

    directory: str | None = None
    """Directory of the updates; absent: `weights` in the run directory."""
    keep: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Number of newest updates to keep."""
    verify: bool = True
    """Whether to verify by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for an update."""
