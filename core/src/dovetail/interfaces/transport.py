"""WeightTransport: weights travel from a trainer to a rollout, and are known to have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


NODE_ADDRESS = "DOVETAIL_NODE_ADDRESS"
"""Environment variable that a runtime sets in its processes where a run is on several machines: the address at which other machines reach
this one."""


@attrs.frozen(kw_only=True)
class TensorSpec:
    """One tensor on the wire."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, such as `bfloat16`."""


@attrs.frozen(kw_only=True)
class AdapterSpec:
    """How a low-rank adapter (LoRA, arXiv 2106.09685) is applied: W + s · B A, with s = alpha / rank.

    Numbers, booleans and text only: `attrs.asdict` of it is JSON.
    """

    rank: int
    """Rows of A and columns of B."""
    alpha: float
    rank_stabilised: bool = False
    """Whether s is alpha / √rank instead (arXiv 2312.03732)."""
    dora: bool = False
    """Whether the sum's rows are scaled to learnt magnitudes, which are sent too (arXiv 2402.09353)."""
    target_modules: tuple[str, ...]
    """Last parts of the names of the adapted layers, such as `q_proj`, sorted; the tensors' names are those of peft's
    checkpoints and give them in full."""


@attrs.frozen(kw_only=True)
class WeightManifest:
    """The description of a weight update, known to both ends before the first byte."""

    version: int
    kind: Literal["full", "adapter", "delta"] = "full"
    tensors: tuple[TensorSpec, ...]
    adapter: AdapterSpec | None = None
    """How the tensors are applied where `kind` is "adapter"; None otherwise."""
    bucket_bytes: int = 256 * 1024 * 1024
    """Largest bucket in which tensors are sent; a larger tensor has a bucket of its own."""
    update_id: str = attrs.field(factory=lambda: token_hex(8), eq=False)
    """Id of this attempt to send, which tells it from others of the same version: earlier runs' or broken-off ones."""
    receivers: int | None = None
    """How many receivers take the update; None: those that are there when it starts."""
    receivers_on: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    """How many of them are on each machine, by `PluginContext.machine`, where the first rank of each machine sends to those
    there; empty where rank 0 sends to all."""
    rendezvous: str | None = None
    """Address at which the sender waits for receivers, in the transport's form; None where receivers know it already."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}
        sizes |= {"int32": 4, "int16": 2}
        total = 0
        for tensor in self.tensors:
            count = 1
            for dim in tensor.shape:
                count *= dim
            total += count * sizes.get(tensor.dtype, 1)
        return total


class WeightSender(ABC):
    """The sending end, in a training rank. Every rank has one: all of them gather the tensors, and rank 0 sends them, or the first
    rank of each machine (`WeightManifest.receivers_on`).
    """

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest as receivers need it, `rendezvous` included; called on rank 0 before both ends start."""
        return manifest

    @abstractmethod
    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send every tensor of the manifest, in its order, shape and dtype, with a digest of each.

        Where a rank can't send any more, it gathers the rest all the same, so that no other rank waits for it, and
        raises only then.

        Raises:
            WeightSyncError: the tensors are not those of the manifest, or they can't be sent.
            ReceiverError: receivers did not come, refused or died, and nothing is wrong with what was sent.
        """

    def close(self) -> None:
        """Release buffers and connections."""


class WeightReceiver(ABC):
    """The receiving end, in an engine worker."""

    lasting: ClassVar[bool] = True
    """Whether a yielded tensor stays valid. False: it is valid until the next one is requested, so a caller that keeps it must copy it.
    In either case it must not be written to."""

    @abstractmethod
    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the manifest's order, each verified against its digest before it is yielded.

        Raises:
            CalledOffError: the sender aborted the update, since another receiver will not connect.
            WeightSyncError: a name, shape, dtype or digest differs, or the transfer broke off.
        """

    def close(self) -> None:
        """Release buffers and connections."""


class WeightTransport(Plugin):
    """A way to transfer weights. Both ends are made from the same config.

    Capabilities: `in_process` (the ends must be in one process), `across_processes` (they may be in several on one
    machine), `across_machines` (on several machines), `on_each_machine` (within a machine, and the first rank of each sends to
    the receivers there), `ends_meet` (`send` returns only when every receiver has taken the update, so both ends run at once).
    """

    @abstractmethod
    def sender(self) -> WeightSender:
        """Make the trainer's end."""

    @abstractmethod
    def receiver(self) -> WeightReceiver:
        """Make the rollout's end."""

    def call_off(self, manifest: WeightManifest, reason: str) -> None:
        """Notify the sender of this update, which is in another process, that a receiver will not connect.

        A sender that is still waiting for receivers aborts the update with a `CalledOffError`; one that has all its receivers continues.
        For transports whose senders do not wait this does nothing.

        Args:
            manifest: the manifest that receivers got.
            reason: why the receiver does not connect.

        Raises:
            WeightSyncError: the sender can't be reached.
        """
