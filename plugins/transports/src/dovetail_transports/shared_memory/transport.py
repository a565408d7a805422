"""The plugin: both ends of the transport for processes of one machine."""

from __future__ import annotations

from pathlib import Path

from dovetail.errors import ConfigError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightReceiver, WeightSender, WeightTransport
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.meeting import Meeting, default_root
from dovetail_transports.shared_memory.receiver import SharedMemoryReceiver
from dovetail_transports.shared_memory.sender import SharedMemorySender


class SharedMemoryTransport(WeightTransport):
    """Hands weights to processes of the same machine through memory that they share.

    The sender fills a ring of buckets while receivers read: a second copy of the model never exists on the way.
    """

    name = "shared_memory"
    api = ">=1.1,<2"
    capabilities = frozenset({"across_processes", "ends_meet"})
    Config = SharedMemoryConfig

    def __init__(self, config: SharedMemoryConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if config.channel is None and context.run_directory is None:
            raise ConfigError(
                "the shared_memory transport has no name for its ends to meet under outside a run",
                hint="set rollout.weight_transport.channel",
            )

    def sender(self) -> WeightSender:
        return SharedMemorySender(self.config, self.context, self._meeting)

    def receiver(self) -> WeightReceiver:
        return SharedMemoryReceiver(self.config, self.context, self._meeting)

    def _meeting(self) -> Meeting:
        config = self.config
        root = default_root() if config.directory is None else Path(config.directory)
        key = config.channel or str(Path(self.context.run_directory or ".").resolve())
        return Meeting(root, key)
