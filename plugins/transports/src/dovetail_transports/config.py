"""The configs of the transports."""

from __future__ import annotations

import attrs

from dovetail.config.sections import PluginSection


@attrs.frozen(kw_only=True)
class SharedMemoryConfig(PluginSection):
    """Weights through memory that the processes of one machine share."""

    buckets: int = attrs.field(default=2, validator=attrs.validators.ge(2))
    """Buckets in shared memory: while receivers read some, the sender fills the next. They bound the memory that an
    update takes on its way: this many times the manifest's bucket size, or its largest tensor."""
    verify: bool = True
    """Prove by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for the other side to come, and for each bucket."""
    directory: str | None = None
    """Where the two sides find each other, by sockets that only this user can open; absent: below `/dev/shm`, or the
    directory for temporary files where there is none."""
    channel: str | None = None
    """A name that both sides share in place of the run's directory."""
