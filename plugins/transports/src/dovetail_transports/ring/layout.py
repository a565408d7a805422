"""The position of each tensor of an update. Both sides compute the positions from the manifest, so the positions are not sent."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import TensorSpec, WeightManifest

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and a multiple of every dtype's size."""
_PAGE = 4096


@attrs.frozen(kw_only=True)
class TensorSlot:
    """The position of one tensor within its bucket."""

    spec: TensorSpec
    dtype: torch.dtype
    offset: int
    """Position of the tensor's first byte in its bucket, a multiple of 64 (`ALIGNMENT`)."""
    nbytes: int

    def view(self, bucket: Tensor) -> Tensor:
        """Return a view of this tensor, in its own shape and dtype, in the memory of its bucket, which is uint8 [bytes]."""
        if not self.nbytes:
            return torch.empty(self.spec.shape, dtype=self.dtype, device=bucket.device)
        octets = bucket.narrow(0, self.offset, self.nbytes)
        return octets.view(self.dtype).view(self.spec.shape)


def extent(places: tuple[TensorSlot, ...]) -> int:
    """Return the size of a bucket in bytes, from the start of its first tensor to the end of its last tensor."""
    return max((place.offset + place.nbytes for place in places), default=0)


@attrs.frozen(kw_only=True)
class BucketLayout:
    """The division of an update's tensors into buckets. Each bucket is a tuple of tensor positions, in the manifest's order."""

    buckets: tuple[tuple[TensorSlot, ...], ...]
    slot_bytes: int
    """Size of the largest bucket in bytes, rounded up to whole pages."""
    fingerprint: str
    """Digest of the manifest's kind, adapter, tensors (name, shape, dtype) and bucket size. The receiver compares it with the sender's
    to detect different manifests."""

    @classmethod
    def of(cls, manifest: WeightManifest) -> BucketLayout:
        """Compute the layout of a manifest's buckets.

        Raises:
            WeightSyncError: a tensor has a dtype that torch lacks, or a negative dimension.
        """
        buckets: list[list[TensorSlot]] = []
        size = end = largest = 0
        for place in _placed(manifest):
            if not buckets or size + place.nbytes > manifest.bucket_bytes:
                buckets.append([])
                size = end = 0
            buckets[-1].append(attrs.evolve(place, offset=end))
            size += place.nbytes
            end += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
            largest = max(largest, end)
        described = [(s.name, list(s.shape), s.dtype) for s in manifest.tensors]
        text = repr((manifest.kind, manifest.adapter, manifest.bucket_bytes, described))
        return cls(
            buckets=tuple(tuple(bucket) for bucket in buckets),
            slot_bytes=max(1, -(-largest // _PAGE)) * _PAGE,
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        )


def _placed(manifest: WeightManifest) -> Iterator[TensorSlot]:
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype) or any(dim < 0 for dim in spec.shape):
            raise WeightSyncError(
                f"weight update {manifest.version} can't be transferred: its tensor {spec.name!r} has dtype {spec.dtype!r} and shape "
                f"{tuple(spec.shape)}; expected a dtype of torch {torch.__version__} and no negative dimension"
            )
        yield TensorSlot(
            spec=spec, dtype=dtype, offset=0, nbytes=math.prod(spec.shape) * dtype.itemsize
        )
