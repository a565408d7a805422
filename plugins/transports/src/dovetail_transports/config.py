"""The configs of the transports."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class RingConfig(PluginSection):
    """Settings common to the transports between processes, which send buckets of tensors through a ring of slots."""

    buckets: int = attrs.field(default=2, validator=attrs.validators.ge(2))
    """Number of slots in the ring, each for one bucket of tensors: while receivers read some slots, the sender fills others. The ring
    takes this many times the manifest's bucket size, or the size of the largest tensor if that is larger."""
    verify: bool = True
    """Whether to check by digests that every tensor arrived as it was sent."""
    timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds to wait for the other side to connect, and for each bucket."""


@attrs.frozen(kw_only=True)
class LocalConfig(RingConfig):
    """Settings common to the transports within one machine: how sender and receivers find each other."""

    directory: str | None = None
    """Directory below which a run makes a private directory for the sockets by which sender and receivers connect. It must belong to
    this user alone. Absent: a directory of this user below `/dev/shm`, or below the directory for temporary files if there is no
    `/dev/shm`."""
    channel: str | None = None
    """Name by which sender and receivers find each other, the same on both sides; absent: the run directory's path."""


@attrs.frozen(kw_only=True)
class SharedMemoryConfig(LocalConfig):
    """Sends weights through memory that the processes of one machine share."""


@attrs.frozen(kw_only=True)
class CudaIpcConfig(LocalConfig):
    """Sends weights through memory of the trainer's GPU, which rollouts on any GPU of the machine open by CUDA IPC."""


@attrs.frozen(kw_only=True)
class NcclConfig(RingConfig):
    """Broadcasts weights from the trainer's GPU to the GPUs of rollouts, on one machine or several."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend that sends the buckets; `auto` is `nccl` between GPUs and `gloo` between CPUs."""
    host: str | None = None
    """The only address at which the trainer's rank 0 listens for receivers. Absent: Ray's address of its machine for a run
    on several machines, else 127.0.0.1, which only rollouts on the same machine can reach. For servers on other machines,
    name an address that they can reach, in a network that you trust."""
