"""The configs of the transports."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class RingConfig(PluginSection):
    """Settings common to the transports between processes, which send buckets through a ring of slots."""

    buckets: int = attrs.field(default=2, validator=attrs.validators.ge(2))
    """Number of slots in the ring: while receivers read some, the sender fills the next. It bounds the memory of an update in transit: this
    many times the manifest's bucket size, or its largest tensor."""
    verify: bool = True
    """Check by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for the other side to connect, and for each bucket."""


@attrs.frozen(kw_only=True)
class LocalConfig(RingConfig):
    """Settings common to the transports within one machine: where sender and receivers find each other."""

    directory: str | None = None
    """Directory in which the two sides find each other, by sockets that only this user can open; absent: below `/dev/shm`, or the
    directory for temporary files where there is none."""
    channel: str | None = None
    """A name that both sides share in place of the run's directory."""


@attrs.frozen(kw_only=True)
class SharedMemoryConfig(LocalConfig):
    """Weights through memory that the processes of one machine share."""


@attrs.frozen(kw_only=True)
class CudaIpcConfig(LocalConfig):
    """Weights through memory of the trainer's GPU, which rollouts of the same machine open by CUDA IPC, on that GPU or another."""


@attrs.frozen(kw_only=True)
class NcclConfig(RingConfig):
    """Weights broadcast from the trainer's GPU to the GPUs of rollouts, on one machine or several."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend that sends the buckets; `auto`: `nccl` between GPUs and `gloo` between CPUs."""
    host: str | None = None
    """Address of rank 0's machine at which it waits for receivers, and the only one at which it listens. Absent: Ray's address
    of the machine for a run on several machines, else 127.0.0.1, which only rollouts on that machine can reach. For servers
    elsewhere, name an address that they can reach, in a network that you trust."""
