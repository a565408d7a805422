"""The plugin: both ends of the transport between separate accelerators, on one machine or several."""

from __future__ import annotations

import os

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    NODE_ADDRESS,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_transports.config import NcclConfig
from dovetail_transports.nccl.broadcast_slots import BroadcastReceiverSlots, BroadcastSenderSlots
from dovetail_transports.nccl.tcp_rendezvous import (
    TcpReceiverRendezvous,
    TcpSenderRendezvous,
    call_off,
)
from dovetail_transports.ring.receiver import RingReceiver
from dovetail_transports.ring.sender import RingSender
from dovetail_transports.ring.slots import numbered


class NcclTransport(WeightTransport):
    """Broadcasts weights from the trainer's accelerator to the rollouts' accelerators, by NCCL, or by gloo between CPUs.

    Sender and receivers form a process group of their own. The group is kept from update to update, and formed anew when
    its members change. A receiver that fails during an update stops the update for all receivers.
    """

    name = "nccl"
    api = ">=1.5,<2"
    capabilities = frozenset({"across_processes", "across_machines", "ends_meet"})
    Config = NcclConfig

    def sender(self) -> WeightSender:
        config = self.config
        backend, device = self._carrier()
        host = config.host or os.environ.get(NODE_ADDRESS) or "127.0.0.1"
        slots = BroadcastSenderSlots(config.buckets, device, backend, host, config.timeout)
        return RingSender(config, self.context, TcpSenderRendezvous(host), slots)

    def receiver(self) -> WeightReceiver:
        backend, device = self._carrier()
        who = f"{self.context.role or 'receiver'}.{self.context.rank} (process {os.getpid()})"
        slots = BroadcastReceiverSlots(device, backend, self.config.timeout)
        return RingReceiver(self.config, TcpReceiverRendezvous(who), slots)

    def call_off(self, manifest: WeightManifest, reason: str) -> None:
        call_off(manifest, reason)

    def _carrier(self) -> tuple[str, torch.device]:
        """Return the backend, and the device on which it needs the buckets."""
        device = torch.device(self.context.device)
        backend = self.config.backend
        if backend == "auto":
            backend = "gloo" if device.type == "cpu" else "nccl"
        if backend == "gloo":
            return backend, torch.device("cpu")
        if device.type == "cpu":
            raise ConfigError(
                "rollout.weight_transport.backend='nccl' connects GPUs, but this process (role "
                f"{self.context.role or 'none'!r}) is on the CPU",
                hint="set rollout.weight_transport.backend=gloo",
            )
        return backend, numbered(device)
