"""Checks of every transport: the tensors match the manifest, and their bytes arrived unchanged.

Transports of other packages use these checks, and so do rollouts that load an update only when it is complete (`received_whole`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import TensorSpec, WeightManifest, WeightReceiver
from dovetail_rollouts.transports.tensor_digest import tensor_digests

Named = tuple[str, Tensor]


@attrs.frozen(eq=False)
class Bucket:
    """Consecutive tensors of a weight update, in the manifest's order, with a digest of each; no digests if the update is not verified."""

    tensors: tuple[Named, ...]
    digests: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Named], *, digest: bool) -> Bucket:
        """Return a bucket of these tensors, with their digests if `digest` is True."""
        digests = tensor_digests([tensor for _, tensor in tensors]) if digest else []
        return cls(tuple(tensors), tuple(digests))

    def verify(self, version: int) -> None:
        """Compute the digests again, on the tensors' current device, and compare them with the sender's, if there are any.

        Raises:
            WeightSyncError: a tensor's bytes differ from those that were sent.
        """
        if not self.digests:
            return
        if len(self.digests) != len(self.tensors):
            raise WeightSyncError(
                f"weight update {version} has {len(self.digests)} digests for {len(self.tensors)} tensors"
            )
        found = tensor_digests([tensor for _, tensor in self.tensors])
        for (name, _), sent, here in zip(self.tensors, self.digests, found, strict=True):
            if sent != here:
                raise WeightSyncError(
                    f"tensor {name!r} of weight update {version} did not arrive as it was sent: "
                    f"digest {here:016x} instead of {sent:016x}",
                    hint="the old weights stay in force; send the update again",
                )


def matched(manifest: WeightManifest, tensors: Iterable[Named]) -> Iterator[Named]:
    """Yield the tensors, each compared with its entry in the manifest.

    Raises:
        WeightSyncError: a name, shape or dtype differs, or tensors are missing or left over.
    """
    incoming = iter(tensors)
    for spec in manifest.tensors:
        entry = next(incoming, None)
        if entry is None:
            raise WeightSyncError(
                f"weight update {manifest.version} broke off before tensor {spec.name!r}"
            )
        name, tensor = entry
        _match(spec, name, tensor, manifest.version)
        yield name, tensor
    extra = next(incoming, None)
    if extra is not None:
        raise WeightSyncError(
            f"weight update {manifest.version} has the tensor {extra[0]!r}, which its manifest lacks"
        )


def bucketed(
    manifest: WeightManifest, tensors: Iterable[Named], *, digest: bool
) -> Iterator[Bucket]:
    """Compare tensors with the manifest as `matched` does, and yield them in buckets.

    A bucket has at most `manifest.bucket_bytes`, unless it consists of a single larger tensor.
    """
    gathered: list[Named] = []
    size = 0
    for name, tensor in matched(manifest, tensors):
        if gathered and size + tensor.nbytes > manifest.bucket_bytes:
            yield Bucket.of(gathered, digest=digest)
            gathered, size = [], 0
        gathered.append((name, tensor.detach()))
        size += tensor.nbytes
    if gathered:
        yield Bucket.of(gathered, digest=digest)


def received_whole(receiver: WeightReceiver, manifest: WeightManifest) -> list[Named]:
    """Return all tensors of an update after verification, so that a partial update is never loaded.

    If the receiver reuses its memory, the tensors are copies. Otherwise they belong to the receiver and must not be written to.

    Raises:
        WeightSyncError: the update failed or is incomplete; see `WeightReceiver.receive`.
    """
    if receiver.lasting:
        return list(receiver.receive(manifest))
    return [(name, tensor.clone()) for name, tensor in receiver.receive(manifest)]


def gather_the_rest(tensors: Iterator[Named]) -> None:
    """Gather the remaining tensors of an update that can't be sent any more, since gathering is collective.

    Every rank takes part in gathering each tensor. If rank 0 stopped early, the other ranks would wait forever.
    """
    for _ in tensors:
        pass


def _match(spec: TensorSpec, name: str, tensor: Tensor, version: int) -> None:
    who = f"weight update {version}"
    if name != spec.name:
        raise WeightSyncError(f"{who} has tensor {name!r} where {spec.name!r} is expected")
    if tuple(tensor.shape) != tuple(spec.shape):
        raise WeightSyncError(
            f"{who} has tensor {name!r} with shape {tuple(tensor.shape)}; "
            f"its manifest says {tuple(spec.shape)}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != spec.dtype:
        raise WeightSyncError(
            f"{who} has tensor {name!r} as {dtype}; its manifest says {spec.dtype}"
        )
