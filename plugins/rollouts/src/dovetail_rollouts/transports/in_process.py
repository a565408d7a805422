"""The in_process transport: trainer and rollout share a process, and tensors are handed over without a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import attrs
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import (
    PluginConfig,
    PluginContext,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_rollouts.transports.checks import Bucket, bucketed, matched
from dovetail_rollouts.transports.config import InProcessTransportConfig


class Mailbox:
    """Holds the latest update until every receiver has taken it. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: int | None = None
        self._broken: tuple[str, str] | None = None
        self._buckets: tuple[Bucket, ...] | None = None
        self._receivers: set[int] = set()
        self._waiting: set[int] = set()

    def register(self, receiver: int) -> None:
        """Register a receiver, given its id; each update is kept until this receiver has taken it, or the next update replaces it."""
        with self._changed:
            self._receivers.add(receiver)
            if self._buckets is not None:
                self._waiting.add(receiver)

    def leave(self, receiver: int) -> None:
        """Remove a receiver; updates are no longer kept for it."""
        with self._changed:
            self._receivers.discard(receiver)
            self._waiting.discard(receiver)
            self._release()

    def put(self, version: int, buckets: tuple[Bucket, ...]) -> None:
        """Replace the mailbox's content by the buckets of this version."""
        with self._changed:
            self._version, self._buckets, self._broken = version, buckets, None
            self._waiting = set(self._receivers)
            self._changed.notify_all()

    def break_off(self, update_id: str, reason: str) -> None:
        """Announce that this attempt at an update failed; the mailbox's content stays."""
        with self._changed:
            self._broken = (update_id, reason)
            self._changed.notify_all()

    def get(self, version: int, update_id: str, timeout: float) -> tuple[Bucket, ...]:
        """Wait for an update, and return its buckets.

        Args:
            version: the version of the weights, whose buckets `put` stores.
            update_id: the id of the attempt to send this version; `break_off` with this id ends the wait.
            timeout: the largest wait in seconds.

        Raises:
            WeightSyncError: the update failed, or did not arrive in time.
        """

        def broken() -> bool:
            return self._broken is not None and self._broken[0] == update_id

        with self._changed:
            there = self._changed.wait_for(
                lambda: (self._version == version and self._buckets is not None) or broken(),
                timeout,
            )
            if self._broken is not None and broken():
                raise WeightSyncError(
                    f"weight update {version} broke off: the sender says: {self._broken[1]}"
                )
            if not there or self._buckets is None:
                raise WeightSyncError(
                    f"weight update {version} did not arrive within {timeout:g} seconds; "
                    f"the latest version that was sent is {self._version}",
                    hint="send the weights before they are received, or raise "
                    "rollout.weight_transport.timeout",
                )
            return self._buckets

    def taken(self, receiver: int) -> None:
        """Record that a receiver has taken the update; the last receiver releases the tensors."""
        with self._changed:
            self._waiting.discard(receiver)
            self._release()

    def _release(self) -> None:
        if not self._waiting:
            self._buckets = None


_shared: dict[str, Mailbox] = {}
_shared_lock = threading.Lock()


def _mailbox(channel: str | None) -> Mailbox:
    if channel is None:
        return Mailbox()
    with _shared_lock:
        return _shared.setdefault(channel, Mailbox())


class InProcessTransport(WeightTransport):
    """Hands tensors from a trainer to rollouts in the same process, without a copy.

    An update may be sent before it is received, or at the same time in another thread. It is kept only
    for receivers that exist when it is sent, so make all receivers first. The tensors are the trainer's
    own; the digests show if the trainer changes them before they are received.
    """

    name = "in_process"
    api = ">=1.0,<2"
    capabilities = frozenset({"in_process"})
    Config = InProcessTransportConfig

    def __init__(self, config: InProcessTransportConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._mailbox = _mailbox(config.channel)

    def sender(self) -> WeightSender:
        return _Sender(self._mailbox, self.config, self.context)

    def receiver(self) -> WeightReceiver:
        return _Receiver(self._mailbox, self.config)


@attrs.frozen(eq=False)
class _Sender(WeightSender):
    mailbox: Mailbox
    config: PluginConfig
    context: PluginContext

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            buckets = tuple(bucketed(manifest, tensors, digest=self.config.verify))
        except Exception as error:
            if self.context.rank == 0:
                self.mailbox.break_off(manifest.update_id, str(error))
            raise
        if self.context.rank == 0:
            self.mailbox.put(manifest.version, buckets)


class _Receiver(WeightReceiver):
    def __init__(self, mailbox: Mailbox, config: PluginConfig) -> None:
        self._mailbox, self._config = mailbox, config
        mailbox.register(id(self))

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        buckets = self._mailbox.get(manifest.version, manifest.update_id, self._config.timeout)
        yield from matched(manifest, _verified(buckets, manifest.version))
        self._mailbox.taken(id(self))

    def close(self) -> None:
        self._mailbox.leave(id(self))


def _verified(buckets: Iterable[Bucket], version: int) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        bucket.verify(version)
        yield from bucket.tensors
