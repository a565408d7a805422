"""WeightTransport: weights travel from a trainer to a rollout, and are known to have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import attrs

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_TRANSPORT_API = "1.0"


@attrs.frozen(kw_only=True)
class TensorSpec:
    """One tensor on the wire."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, such as `bfloat16`."""


@attrs.frozen(kw_only=True)
class WeightManifest:
    """What an update carries; both ends know it before the first byte."""

    version: int
    kind: Literal["full", "adapter", "delta"] = "full"
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = 256 * 1024 * 1024
    """Tensors travel in buckets of at most this size (or one tensor)."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
        total = 0
        for tensor in self.tensors:
            count = 1
            for dim in tensor.shape:
                count *= dim
            total += count * sizes.get(tensor.dtype, 1)
        return total


class WeightSender(ABC):
    """The end in a training rank."""

    @abstractmethod
    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send every tensor of the manifest, in its order, with a digest of each."""

    def close(self) -> None:
        """Release buffers and connections."""


class WeightReceiver(ABC):
    """The end in an engine worker."""

    @abstractmethod
    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the manifest's order, each verified against its digest before it is yielded.

        Raises:
            WeightSyncError: a name, shape, dtype or digest differs, or the transfer broke off.
        """

    def close(self) -> None:
        """Release buffers and connections."""


class WeightTransport(Plugin):
    """A way for weights to travel. Both ends are made from the same config."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """Make the trainer's end."""

    @abstractmethod
    def receiver(self) -> WeightReceiver:
        """Make the rollout's end."""
