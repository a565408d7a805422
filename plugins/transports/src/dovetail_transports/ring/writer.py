"""BucketCopier: copies the tensors of a bucket into its slot, and waits for the copies."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from dovetail_rollouts import DeferredDigests
from dovetail_transports.ring.layout import TensorSlot
from dovetail_transports.ring.slots import SenderSlots

_BYTES_AT_ONCE = 64 << 20
"""Tensors of an accelerator are held until they have this many bytes in all, and are then digested and copied together: a launch for
each small tensor would take longer than its copy."""


@attrs.frozen(eq=False)
class Written:
    """A bucket whose copies and digests have been queued."""

    number: int
    nbytes: int
    """Number of bytes of the bucket, from the start of its slot."""
    digests: DeferredDigests
    copied: tuple[torch.Event, ...]

    def wait(self) -> list[int]:
        """Wait until the bytes are in the slot, and return the tensors' digests."""
        for event in self.copied:
            event.synchronize()
        return self.digests.result()


class BucketCopier:
    """Copies tensors into buckets.

    Copies between CPUs are synchronous. Copies to or from an accelerator run on a separate stream, while the next tensors are gathered.

    Args:
        verify: whether to compute digests of the tensors.
    """

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, slots: SenderSlots, number: int) -> BucketWriter:
        """Return a writer for the bucket with index `number`, whose slot must be free."""
        return BucketWriter(self, slots, number)

    def stream(self, device: torch.device) -> torch.Stream:
        """Return the stream for copies to and from this device."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        return self._streams[device]

    @property
    def verify(self) -> bool:
        """Whether digests are computed."""
        return self._verify


class BucketWriter:
    """Fills one slot with the tensors of a bucket."""

    def __init__(self, writer: BucketCopier, slots: SenderSlots, number: int) -> None:
        self._writer, self._slots, self._number = writer, slots, number
        self._slot = slots.slot(number)
        self._digests = DeferredDigests()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._held: list[tuple[Tensor, Tensor]] = []
        self._held_bytes = self._nbytes = 0

    def put(self, place: TensorSlot, tensor: Tensor) -> None:
        """Queue the copy of a tensor to its position in the bucket, and its digest on the tensor's own device.

        Args:
            place: the position of the tensor in the bucket.
            tensor: the tensor, in the shape that the manifest names.
        """
        source = tensor.detach()
        if self._writer.verify:
            self._digests.add(source)
        self._nbytes = max(self._nbytes, place.offset + place.nbytes)
        if not place.nbytes:
            return
        target = place.view(self._slot)
        if source.device.type == "cpu" == target.device.type:
            target.copy_(source)
            return
        if self._held and self._held[-1][1].device != source.device:
            self._copy()
        self._held.append((target, source))
        self._held_bytes += place.nbytes
        if self._held_bytes >= _BYTES_AT_ONCE:
            self._copy()

    def finish(self) -> Written:
        """Queue the remaining copies and digests, and return the bucket."""
        self._copy()
        self._digests.launch()
        queued = [
            stream.record_event()
            for device, copying in self._streams.items()
            for stream in (copying, torch.accelerator.current_stream(device))  # copies, digests
        ]
        return Written(self._number, self._nbytes, self._digests, tuple(queued))

    def _copy(self) -> None:
        if not self._held:
            return
        self._digests.launch()
        targets, sources = (
            [target for target, _ in self._held],
            [source for _, source in self._held],
        )
        self._held, self._held_bytes = [], 0
        device = sources[0].device if sources[0].device.type != "cpu" else targets[0].device
        self._slots.pin(device)
        stream = self._writer.stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for source in sources:
            if source.device.type != "cpu":
                # torch must not reuse the tensor's memory before the copy has finished.
                source.record_stream(stream)
        self._streams[device] = stream
