"""What this engine sends in a weight update: the network's tensors by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dovetail.interfaces import PluginContext, WeightManifest
from dovetail_torch_engines import Ranks, Sending
from dovetail_train_megatron.names import TensorTable
from dovetail_train_megatron.network import HEADS, Network
from dovetail_train_megatron.weights import Receiving, manifest_of, outgoing


class NetworkSending(Sending):
    """Sends a network's weights from one rank: all are sent by rank 0, or by the first rank of each machine."""

    def __init__(
        self, context: PluginContext, ranks: Ranks, network: Network, table: TensorTable
    ) -> None:
        super().__init__(
            context, ranks, critic=None if network.head == "lm" else HEADS[network.head]
        )
        self._network, self._table = network, table

    def described(self, version: int) -> WeightManifest:
        return manifest_of(self._network, self._table, version)

    def outgoing(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        to: Receiving = "all" if manifest.receivers_on else 0
        return outgoing(self._network, self._table, self._ranks.rank, to)
