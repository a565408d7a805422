"""The trainer's end of weight updates: which tensors go, and through which transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dovetail.errors import WeightSyncError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightManifest
from dovetail.training.ranks import Ranks
from dovetail_train_fsdp2.forward import PolicyScorer, Scorer
from dovetail_train_fsdp2.weights import check_manifest, manifest_of, outgoing

if TYPE_CHECKING:
    from dovetail.interfaces.transport import WeightSender, WeightTransport


class Sending:
    """One rank's sender, made when it is first needed and kept for all updates."""

    def __init__(self, context: PluginContext, ranks: Ranks) -> None:
        self._context = context
        self._ranks = ranks
        self._sender: WeightSender | None = None

    def manifest(self, scorer: Scorer, version: int) -> WeightManifest:
        """What an update would carry; as receivers need it, where there is a transport.

        Raises:
            WeightSyncError: this is a critic.
        """
        manifest = manifest_of(self._policy(scorer), version)
        if self._context.transport is None:
            return manifest
        return self._made().prepare(manifest)

    def send(self, scorer: Scorer, version: int, manifest: WeightManifest) -> None:
        """Gather and send every tensor of the manifest; collective.

        Raises:
            WeightSyncError: there is no transport, version and manifest differ, or this is a critic.
        """
        policy = self._policy(scorer)
        with self._ranks.together():
            if version != manifest.version:
                raise WeightSyncError(
                    f"version {version} was asked for with the manifest of version {manifest.version}"
                )
            check_manifest(policy, manifest)
            sender = self._made()
        tensors = outgoing(policy, manifest)
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

    def _policy(self, scorer: Scorer) -> PolicyScorer:
        if not isinstance(scorer, PolicyScorer):
            raise WeightSyncError(
                f"role {self._context.role or 'actor'!r} ends in {scorer.head}, and no rollout takes the weights "
                "of a critic",
                hint="send the weights of the actor",
            )
        return scorer
