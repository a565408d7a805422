"""SharedDeviceMemory: memory of an accelerator that other processes can open, as the ring needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class Allocation:
    """Memory that this process has made or opened."""

    address: int
    """Where it begins, for this process."""
    size: int
    """Bytes."""
    octets: Tensor | None
    """uint8 [size], the memory itself; None where it is another device's, from which one can only copy."""
    handle: bytes
    """With it, other processes open the memory."""


class SharedDeviceMemory(ABC):
    """What one process does with the memory of its device. Sizes are in bytes."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The device, by a name that all processes of the machine give it, whatever its number is in each."""

    @abstractmethod
    def allocate(self, size: int) -> Allocation:
        """Return new memory, which is no part of any allocator's pool.

        Raises:
            WeightSyncError: there is not so much.
        """

    @abstractmethod
    def free(self, made: Allocation) -> None:
        """Free what `allocate` made."""

    @abstractmethod
    def open(self, handle: bytes, size: int, identity: str) -> Allocation:
        """Open what another process made on the device of that identity.

        Raises:
            WeightSyncError: it can't be opened from this device.
        """

    @abstractmethod
    def shut(self, opened: Allocation) -> None:
        """Close what `open` opened; views of it end."""

    @abstractmethod
    def staging(self, size: int) -> Tensor:
        """Return uint8 [size]: memory of this device for copies from another."""

    @abstractmethod
    def fetch(self, target: Tensor, source: Allocation, offset: int) -> None:
        """Queue a copy into all of `target`, uint8 [n], from n bytes of another device's memory, on the current stream."""
