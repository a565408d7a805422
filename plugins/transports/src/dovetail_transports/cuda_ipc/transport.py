"""The plugin: both ends of the transport for processes that share a GPU, or a machine of GPUs that reach each other."""

from __future__ import annotations

import torch

from dovetail.errors import ConfigError
from dovetail_transports.config import CudaIpcConfig
from dovetail_transports.cuda_ipc.cuda_memory import CudaMemory
from dovetail_transports.cuda_ipc.device_slots import DeviceReceiverSlots, DeviceSenderSlots
from dovetail_transports.ring.local import LocalTransport
from dovetail_transports.ring.slots import ReceiverSlots, SenderSlots, numbered


class CudaIpcTransport(LocalTransport):
    """Hands weights over in the trainer's GPU, whose memory the rollout's processes open.

    The weights never leave the accelerator: the trainer packs them into a small ring of buckets there, and processes on
    the same GPU read the buckets where they are; processes on other GPUs of the machine copy each bucket over the link.
    """

    name = "cuda_ipc"
    api = ">=1.5,<2"
    capabilities = frozenset({"across_processes", "on_each_machine", "ends_meet"})
    Config = CudaIpcConfig

    def memory(self, device: torch.device) -> CudaMemory:
        """Return the memory of this process's device.

        Raises:
            ConfigError: the device is not a CUDA GPU.
        """
        if device.type != "cuda":
            raise ConfigError(
                f"the cuda_ipc transport joins processes on CUDA GPUs, and this one, of role "
                f"{self.context.role or 'none'!r}, is on {str(device)!r}",
                hint="set rollout.weight_transport=shared_memory",
            )
        return CudaMemory(device)

    def sender_slots(self) -> SenderSlots:
        return DeviceSenderSlots(
            self.config.buckets, self.memory(numbered(torch.device(self.context.device)))
        )

    def receiver_slots(self) -> ReceiverSlots:
        device = numbered(torch.device(self.context.device))
        return DeviceReceiverSlots(device, self.memory(device))
