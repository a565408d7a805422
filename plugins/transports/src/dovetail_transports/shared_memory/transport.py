"""The plugin: both ends of the transport for processes of one machine."""

from __future__ import annotations

import torch

from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.ring.local import LocalTransport
from dovetail_transports.ring.slots import ReceiverSlots, SenderSlots
from dovetail_transports.shared_memory.host_slots import SharedReceiverSlots, SharedSenderSlots


class SharedMemoryTransport(LocalTransport):
    """Hands weights to processes of the same machine through memory that they share.

    The sender fills a ring of buckets while receivers read: a second copy of the model never exists on the way.
    """

    name = "shared_memory"
    api = ">=1.5,<2"
    capabilities = frozenset({"across_processes", "on_each_machine", "ends_meet"})
    Config = SharedMemoryConfig

    def sender_slots(self) -> SenderSlots:
        return SharedSenderSlots(self.config.buckets)

    def receiver_slots(self) -> ReceiverSlots:
        return SharedReceiverSlots(torch.device(self.context.device))
