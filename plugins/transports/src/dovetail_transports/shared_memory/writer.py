"""Writer: puts the tensors of a bucket into its slot, and tells when their bytes are there."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from dovetail.numerics import DeferredDigests
from dovetail_transports.shared_memory.layout import Place
from dovetail_transports.shared_memory.ring import Ring


@attrs.frozen(eq=False)
class Written:
    """A bucket whose copies and digests have been queued."""

    number: int
    digests: DeferredDigests
    copied: tuple[torch.Event, ...]

    def wait(self) -> list[int]:
        """Wait until the bytes are in the slot; the tensors' digests."""
        for event in self.copied:
            event.synchronize()
        return self.digests.result()


class Writer:
    """Copies from a CPU at once, and from an accelerator on a stream of its own, beside the gathering of the next
    tensors.

    Args:
        verify: whether digests are wanted.
    """

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, ring: Ring, number: int) -> BucketWriter:
        """Begin a bucket; its slot must be free."""
        return BucketWriter(self, ring, number)

    def stream(self, device: torch.device) -> torch.Stream:
        """The stream on which copies from this device run."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        return self._streams[device]

    @property
    def verify(self) -> bool:
        """Whether digests are wanted."""
        return self._verify


class BucketWriter:
    """Fills one slot."""

    def __init__(self, writer: Writer, ring: Ring, number: int) -> None:
        self._writer, self._ring, self._number = writer, ring, number
        self._slot = ring.slot(number)
        self._digests = DeferredDigests()
        self._streams: dict[torch.device, torch.Stream] = {}

    def put(self, place: Place, tensor: Tensor) -> None:
        """Queue the copy of a tensor, and its digest where it is now."""
        source = tensor.detach()
        if self._writer.verify:
            self._digests.add(source)
        if not place.nbytes:
            return
        target = place.view(self._slot)
        if source.device.type == "cpu":
            target.copy_(source)
            return
        self._ring.pin(source.device)
        stream = self._writer.stream(source.device)
        stream.wait_stream(torch.accelerator.current_stream(source.device))
        with stream:
            target.copy_(source, non_blocking=True)
        # Its memory is not given to another tensor before the copy is through.
        source.record_stream(stream)
        self._streams[source.device] = stream

    def finish(self) -> Written:
        """All tensors have been put."""
        queued = [
            stream.record_event()
            for device, copying in self._streams.items()
            for stream in (copying, torch.accelerator.current_stream(device))  # copies, digests
        ]
        return Written(self._number, self._digests, tuple(queued))
