"""The rollout's end: maps the slots, proves each bucket, and hands its tensors over as views."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightManifest, WeightReceiver
from dovetail.interfaces.transport_checks import Bucket
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.channel import Channel, PeerGone
from dovetail_transports.shared_memory.layout import Layout
from dovetail_transports.shared_memory.meeting import Meeting
from dovetail_transports.shared_memory.ring import Ring


class SharedMemoryReceiver(WeightReceiver):
    """Registers when it is made, and takes the updates that it is asked for.

    Tensors are views of memory that the sender fills again: each holds until the next one is asked for.
    """

    lasting: ClassVar[bool] = False

    def __init__(
        self, config: SharedMemoryConfig, context: PluginContext, meeting: Callable[[], Meeting]
    ) -> None:
        self._config = config
        self._device = torch.device(context.device)
        self._meeting = meeting()
        self._ring: Ring | None = None
        try:
            self._listener = self._meeting.listen(f"{context.role or 'receiver'}.{context.rank}")
        except BaseException:
            self._meeting.leave()
            raise

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        layout = Layout.of(manifest)
        channel, hello = self._accept(manifest, layout)
        try:
            ring = self._ring_of(channel, hello, layout)
            for number, places in enumerate(layout.buckets):
                digests = self._announced(channel, manifest, number)
                slot = ring.slot(number)
                bucket = Bucket(
                    tuple((place.spec.name, place.view(slot)) for place in places), digests
                )
                bucket.verify(manifest.version)
                yield from bucket.tensors
                with suppress(PeerGone):
                    # Gone after the last bucket, it has given up on another receiver; this one has all.
                    channel.send({"done": number + 1})
        except PeerGone as error:
            raise _broken(manifest, "the sender ended or closed its end") from error
        except BaseException as error:
            with suppress(PeerGone, TimeoutError):
                reason = "it stopped receiving" if isinstance(error, GeneratorExit) else str(error)
                channel.send({"refused": reason})
            raise
        finally:
            channel.close()

    def close(self) -> None:
        self._listener.close()
        self._meeting.leave()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    # -- the pieces ----------------------------------------------------------------------------

    def _accept(self, manifest: WeightManifest, layout: Layout) -> tuple[Channel, dict[str, Any]]:
        """The sender's connection for this very update; those of attempts that are over are closed."""
        deadline = time.monotonic() + self._config.timeout
        others: list[int] = []
        while True:
            self._listener.settimeout(max(deadline - time.monotonic(), 1e-4))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise self._nobody_came(manifest, others) from error
            channel = Channel(connection, self._config.timeout)
            hello = self._hello(channel, deadline)
            if hello is not None and hello["update_id"] == manifest.update_id:
                if hello["fingerprint"] == layout.fingerprint:
                    return channel, hello
                reason = f"the manifests of weight update {manifest.version} differ between sender and receiver"
                self._refuse(channel, reason)
                raise WeightSyncError(
                    reason, hint="hand the same manifest to send_weights and receive_weights"
                )
            if hello is not None:
                others.append(hello["version"])
                self._refuse(channel, f"waits for weight update {manifest.version}, another one")
            channel.close()

    def _hello(self, channel: Channel, deadline: float) -> dict[str, Any] | None:
        """The first message; None where the sender has gone again without one."""
        try:
            hello = channel.receive(max(deadline - time.monotonic(), 0.0))
        except (PeerGone, TimeoutError):
            return None
        return hello if "update_id" in hello else None

    def _refuse(self, channel: Channel, reason: str) -> None:
        with suppress(PeerGone, TimeoutError):
            channel.send({"refused": reason})
        channel.close()

    def _nobody_came(self, manifest: WeightManifest, others: list[int]) -> WeightSyncError:
        seen = f"; there came other updates: {others}" if others else ""
        return WeightSyncError(
            f"weight update {manifest.version} did not come within {self._config.timeout:g} seconds: no sender "
            f"opened it at {self._meeting.directory}{seen}",
            hint="shared_memory joins processes of one machine and one run: check where the trainer runs, "
            "or raise rollout.weight_transport.timeout",
        )

    def _announced(
        self, channel: Channel, manifest: WeightManifest, number: int
    ) -> tuple[int, ...]:
        """Wait for a bucket: the digests of its tensors."""
        try:
            message = channel.receive(self._config.timeout)
        except TimeoutError as error:
            raise _broken(
                manifest, f"bucket {number} did not come within {self._config.timeout:g} seconds"
            ) from error
        if "broke_off" in message:
            raise _broken(manifest, f"the sender says: {message['broke_off']}")
        if message.get("bucket") != number:
            raise _broken(manifest, f"{message} came where bucket {number} is due")
        digests = tuple(int(digest, 16) for digest in message["digests"])
        if self._config.verify and not digests:
            raise WeightSyncError(
                f"weight update {manifest.version} came without digests",
                hint="give both sides the same rollout.weight_transport.verify",
            )
        return digests

    def _ring_of(self, channel: Channel, hello: dict[str, Any], layout: Layout) -> Ring:
        """The sender's ring, mapped once and kept for the next updates."""
        descriptor = channel.take_descriptor()
        try:
            if self._ring is None or self._ring.name != hello["ring"]:
                if self._ring is not None:
                    self._ring.close()
                self._ring = None
                if hello["slot_bytes"] < layout.slot_bytes:
                    raise WeightSyncError(
                        f"the sender's buckets hold {hello['slot_bytes']} bytes where {layout.slot_bytes} are due"
                    )
                self._ring = Ring(
                    descriptor, hello["slots"], hello["slot_bytes"], str(hello["ring"])
                )
                self._ring.pin(self._device)
        finally:
            os.close(descriptor)
        return self._ring


def _broken(manifest: WeightManifest, why: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight update {manifest.version} broke off: {why}",
        hint="the old weights stay in force; send the update again",
    )
