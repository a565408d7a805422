"""LocalTransport, the base of the transports within one machine: both sides meet in a private directory."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import (
    PluginConfig,
    PluginContext,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_transports.ring.receiver import RingReceiver
from dovetail_transports.ring.rendezvous import LocalReceiverRendezvous, LocalSenderRendezvous
from dovetail_transports.ring.rendezvous_directory import RendezvousDirectory, default_root
from dovetail_transports.ring.sender import RingSender
from dovetail_transports.ring.slots import ReceiverSlots, SenderSlots


class LocalTransport(WeightTransport):
    """Base of the transports within one machine; their configs have `directory` and `channel`.

    In a run on several machines, each machine has its own senders and receivers. A receiver that will not connect then calls the update
    off by a note in the run's directory, which all machines share.
    """

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if config.channel is None and context.run_directory is None:
            raise ConfigError(
                f"the {self.name} transport needs a run directory or a channel, by which sender and receivers find each other",
                hint="set rollout.weight_transport.channel",
            )

    @abstractmethod
    def sender_slots(self) -> SenderSlots:
        """Return the trainer's end of the ring."""

    @abstractmethod
    def receiver_slots(self) -> ReceiverSlots:
        """Return a rollout's end of the ring."""

    def sender(self) -> WeightSender:
        rendezvous = LocalSenderRendezvous(self._directory)
        return RingSender(self.config, self.context, rendezvous, self.sender_slots())

    def receiver(self) -> WeightReceiver:
        slots = self.receiver_slots()
        who = f"{self.context.role or 'receiver'}.{self.context.rank}"
        return RingReceiver(self.config, LocalReceiverRendezvous(self._directory(), who), slots)

    def call_off(self, manifest: WeightManifest, reason: str) -> None:
        try:
            directory = self._directory(several=bool(manifest.receivers_on))
            try:
                directory.call_off(manifest.update_id, reason)
            finally:
                directory.leave()
        except OSError as error:
            raise WeightSyncError(
                f"weight update {manifest.version} is cancelled, but its sender could not be notified: {error}"
            ) from error

    def _directory(self, *, several: bool = False) -> RendezvousDirectory:
        """Join this machine's rendezvous directory.

        Args:
            several: whether the run is known to have several machines, so that notes go to the run's directory. They also go there
                if the context names a machine.
        """
        config, context = self.config, self.context
        root = default_root() if config.directory is None else Path(config.directory)
        key = config.channel or str(Path(context.run_directory or ".").resolve())
        several = several or context.machine is not None
        notes = context.run_directory if several else None
        return RendezvousDirectory(
            root, f"{self.name} {key} {context.machine or ''}".strip(), notes
        )
