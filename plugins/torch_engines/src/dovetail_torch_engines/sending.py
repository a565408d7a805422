"""The trainer's side of weight updates: which tensors are sent, and through which transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import cast

from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import PluginContext, WeightManifest, WeightSender, WeightTransport
from dovetail_torch_engines.ranks import Ranks


class Sending(ABC):
    """One rank's sender of weight updates, created at the first update and used for all.

    An engine implements `described`, which lists the tensors to send, and `outgoing`, which gathers them.
    """

    def __init__(self, context: PluginContext, ranks: Ranks, *, critic: str | None = None) -> None:
        """Store the arguments; the sender is connected at the first update.

        Args:
            context: the engine's context, with the weight transport if there is one.
            ranks: all ranks of the engine.
            critic: the name of a critic's head for errors, such as `a value head`; None for a policy.
        """
        self._context, self._ranks, self._critic = context, ranks, critic
        self._sender: WeightSender | None = None

    @abstractmethod
    def described(self, version: int) -> WeightManifest:
        """Return names, shapes and dtypes of the tensors that `outgoing` yields, in the same order, without gathering a tensor."""

    @abstractmethod
    def outgoing(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the manifest's tensors in the manifest's shapes and dtypes, each gathered on request. Collective, one tensor after
        another.
        """

    def manifest(self, version: int) -> WeightManifest:
        """Return the manifest of an update: `described`, with the data that receivers need to connect if there is a transport.

        Raises:
            WeightSyncError: the model is a critic.
        """
        self._check_policy()
        manifest = self.described(version)
        if self._context.transport is None:
            return manifest
        return self._made().prepare(manifest)

    def send(self, version: int, manifest: WeightManifest) -> None:
        """Gather and send every tensor of the manifest; collective.

        Raises:
            WeightSyncError: there is no transport, the manifest does not match version or model, or the model is a critic; raised
                on every rank.
        """
        with self._ranks.together():
            self._check_policy()
            self._check(version, manifest)
            sender = self._made()
        tensors = self.outgoing(manifest)
        try:
            sender.send(manifest, tensors)
        finally:
            # Consume the remaining tensors even after an error: the other ranks take part in gathering each.
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
                    f"role {self._context.role!r} can't send its weights: it has no weight transport",
                    hint="set rollout.weight_transport",
                )
            self._sender = cast("WeightTransport", self._context.transport).sender()
        return self._sender

    def _check_policy(self) -> None:
        if self._critic is not None:
            raise WeightSyncError(
                f"the weights of role {self._context.role or 'actor'!r} can't be sent to a rollout: its model ends in "
                f"{self._critic}",
                hint="send the weights of the actor",
            )

    def _check(self, version: int, manifest: WeightManifest) -> None:
        if version != manifest.version:
            raise WeightSyncError(
                f"weights of version {version} can't be sent with the manifest of version {manifest.version}; expected the "
                "manifest of the same version"
            )
        own = {spec.name: spec for spec in self.described(version).tensors}
        for spec in manifest.tensors:
            mine = own.get(spec.name)
            if mine is None or mine.shape != spec.shape:
                have = "no tensor of that name" if mine is None else f"it with shape {mine.shape}"
                raise WeightSyncError(
                    f"the manifest of version {version} lists the tensor {spec.name!r} with shape {spec.shape}, "
                    f"but the model has {have}",
                    hint="make the manifest with weight_manifest() of the engine that sends the weights",
                )
