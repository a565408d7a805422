"""WeightTransport: sends weights from training ranks to rollout engines, and verifies their arrival."""

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
"""Environment variable that a runtime sets in its processes if a run is on several machines: the address at which other machines reach
this machine."""


@attrs.frozen(kw_only=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that is sent."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype without the prefix, such as `bfloat16`."""


@attrs.frozen(kw_only=True)
class AdapterSpec:
    """How a low-rank adapter (LoRA, arXiv 2106.09685) is applied: W + s · B A, with s = alpha / rank.

    All values are numbers, booleans or text, so that `attrs.asdict` gives JSON.
    """

    rank: int
    """Rank: rows of the factor A and columns of the factor B."""
    alpha: float
    rank_stabilised: bool = False
    """Whether the scale s is alpha / √rank in place of alpha / rank (arXiv 2312.03732)."""
    dora: bool = False
    """Whether the rows of W + s · B A are scaled to learnt magnitudes, which are sent too (DoRA, arXiv 2402.09353)."""
    target_modules: tuple[str, ...]
    """Last parts of the adapted layers' names, such as `q_proj`, sorted. The names of the sent tensors are those of peft's
    checkpoints, which contain the full layer names."""


@attrs.frozen(kw_only=True)
class WeightManifest:
    """The description of a weight update, known to sender and receivers before the transfer."""

    version: int
    kind: Literal["full", "adapter", "delta"] = "full"
    tensors: tuple[TensorSpec, ...]
    adapter: AdapterSpec | None = None
    """How the tensors are applied if `kind` is "adapter"; else None."""
    bucket_bytes: int = 256 * 1024 * 1024
    """Maximum bytes of a bucket, in which several tensors are sent together; a larger tensor has a bucket of its own."""
    update_id: str = attrs.field(factory=lambda: token_hex(8), eq=False)
    """Id of this attempt to send. Other attempts to send the same version, such as those of earlier runs, have other ids."""
    receivers: int | None = None
    """Number of receivers of the update; None means all receivers that exist when the transfer starts."""
    receivers_on: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    """Number of receivers on each machine (`PluginContext.machine`), if the first rank of each machine sends to the receivers on
    its machine. Empty if rank 0 sends to all receivers."""
    rendezvous: str | None = None
    """Address at which the sender waits for receivers, in the transport's format; None if receivers know the address already."""

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all tensors together."""
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
    """The sending end of a weight transfer, one in every training rank.

    All ranks gather the tensors. Rank 0 sends them, or the first rank of each machine (`WeightManifest.receivers_on`).
    """

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest as receivers need it, `rendezvous` included. Called on rank 0 before sender and receivers start."""
        return manifest

    @abstractmethod
    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors in the order, shapes and dtypes of the manifest, each with a digest.

        A rank that can't send any more still gathers the remaining tensors before it raises an error, so that no other rank
        waits for it.

        Raises:
            WeightSyncError: the tensors differ from the manifest, or can't be sent.
            ReceiverError: a receiver did not connect, refused or died; the tensors themselves are correct.
        """

    def close(self) -> None:
        """Release buffers and connections."""


class WeightReceiver(ABC):
    """The receiving end of a weight transfer, in a worker of a rollout engine."""

    lasting: ClassVar[bool] = True
    """Whether a yielded tensor stays valid. If False, the tensor is valid until the next one is requested, and a caller must copy it to
    keep it. Never write to a yielded tensor."""

    @abstractmethod
    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the manifest's order, each verified against its digest before it is yielded.

        Raises:
            CalledOffError: the sender aborted the update, because another receiver will not connect.
            WeightSyncError: a name, shape, dtype or digest differs, or the transfer was interrupted.
        """

    def close(self) -> None:
        """Release buffers and connections."""


class WeightTransport(Plugin):
    """A way to transfer weights from training ranks to rollout engines. Sender and receivers are made from the same config.

    Capabilities: `in_process` (sender and receivers must be in one process), `across_processes` (in several processes of one
    machine), `across_machines` (on several machines), `on_each_machine` (within a machine: the first rank of each machine sends
    to the machine's receivers), `ends_meet` (`send` waits until every receiver has taken the update, so both must run at once).
    """

    @abstractmethod
    def sender(self) -> WeightSender:
        """Make the sender for a training rank."""

    @abstractmethod
    def receiver(self) -> WeightReceiver:
        """Make the receiver for a worker of a rollout engine."""

    def call_off(self, manifest: WeightManifest, reason: str) -> None:
        """Notify the update's sender, which is in another process, that a receiver will not connect.

        A sender that is still waiting for receivers aborts the update with a `CalledOffError`; a sender that has all receivers continues.
        In transports whose senders do not wait, the call has no effect.

        Args:
            manifest: the manifest that receivers got.
            reason: the reason why the receiver does not connect.

        Raises:
            WeightSyncError: the sender can't be reached.
        """
