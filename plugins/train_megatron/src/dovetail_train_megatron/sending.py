"""The trainer's end of weight updates: which tensors go, and through which transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dovetail.errors import WeightSyncError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightManifest
from dovetail.training.ranks import Ranks
from dovetail_train_megatron.names import Table
from dovetail_train_megatron.network import HEADS, Network
from dovetail_train_megatron.weights import check_manifest, manifest_of, outgoing

if TYPE_CHECKING:
    from dovetail.interfaces.transport import WeightSender, WeightTransport


class Sending:
    """One rank's sender, made when it is first needed and kept for all updates."""

    def __init__(
        self, context: PluginContext, ranks: Ranks, network: Network, table: Table
    ) -> None:
        self._context, self._ranks = context, ranks
        self._network, self._table = network, table
        self._sender: WeightSender | None = None

    def manifest(self, version: int) -> WeightManifest:
        """What an update would carry; as receivers need it, where there is a transport.

        Raises:
            WeightSyncError: this is a critic.
        """
        self._check_policy()
        manifest = manifest_of(self._network, self._table, version)
        if self._context.transport is None:
            return manifest
        return self._made().prepare(manifest)

    def send(self, version: int, manifest: WeightManifest) -> None:
        """Gather and send every tensor of the manifest; collective.

        Raises:
            WeightSyncError: there is no transport, version and manifest differ, or this is a critic.
        """
        with self._ranks.together():
            self._check_policy()
            if version != manifest.version:
                raise WeightSyncError(
                    f"version {version} was asked for with the manifest of version {manifest.version}"
                )
            check_manifest(self._network, self._table, manifest)
            sender = self._made()
        tensors = outgoing(self._network, self._table, self._ranks.rank)
        try:
            sender.send(manifest, tensors)
        finally:
            # Whatever becomes of them, tensors are gathered to the end: other ranks wait for it.
            for _ in tensors:
                pass

    def close(self) -> None:
        """Close the sender; safe to call twice."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _made(self) -> WeightSender:
        if self._sender is None:
            if self._context.transport is None:
                raise WeightSyncError(
                    f"role {self._context.role!r} has no weight transport to send through",
                    hint="set rollout.weight_transport",
                )
            self._sender = cast("WeightTransport", self._context.transport).sender()
        return self._sender

    def _check_policy(self) -> None:
        if self._network.head != "lm":
            raise WeightSyncError(
                f"role {self._context.role or 'actor'!r} ends in {HEADS[self._network.head]}, and no rollout takes the "
                "weights of a critic",
                hint="send the weights of the actor",
            )
