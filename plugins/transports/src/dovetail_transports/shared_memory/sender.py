"""The trainer's end: fills slots, announces them, and fills each again when every receiver is done with it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightManifest, WeightSender
from dovetail.interfaces.transport_checks import gather_the_rest, matched
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.channel import Channel, PeerGone
from dovetail_transports.shared_memory.layout import Layout
from dovetail_transports.shared_memory.meeting import Meeting, who_of
from dovetail_transports.shared_memory.ring import Ring, new_memory, new_name
from dovetail_transports.shared_memory.writer import Writer, Written

_POLL_SECONDS = 0.01


class NobodyLeftError(WeightSyncError):
    """No receiver can take the rest of an update."""


@attrs.define(eq=False)
class _Receiver:
    """What the sender knows of one receiver during an update."""

    who: str
    channel: Channel
    done: int = 0
    """Buckets that it has finished with."""
    fault: str | None = None
    """Why it does not take the update."""


class SharedMemorySender(WeightSender):
    """Sends to every receiver that has registered by the time an update starts.

    Args:
        meeting: makes the membership that it needs, when the first update is sent.
    """

    def __init__(
        self, config: SharedMemoryConfig, context: PluginContext, meeting: Callable[[], Meeting]
    ) -> None:
        self._config, self._context, self._meet = config, context, meeting
        self._meeting: Meeting | None = None
        self._writer = Writer(verify=config.verify)
        self._ring: Ring | None = None
        self._memory: int | None = None

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As the interface says; returns when every receiver is through with the last bucket.

        Raises:
            WeightSyncError: no receiver registered, or one did not come, refused the update or ended during it. The
                others have it whole.
        """
        gathered = iter(tensors)
        if self._context.rank != 0:
            gather_the_rest(matched(manifest, gathered))
            return
        receivers: list[_Receiver] = []
        source = _Source(matched(manifest, gathered))
        try:
            layout = Layout.of(manifest)
            receivers = self._connect(manifest)
            self._send(manifest, layout, source, receivers)
        except Exception as error:
            for receiver in receivers:
                if receiver.fault is not None:
                    continue
                with suppress(PeerGone, TimeoutError):
                    receiver.channel.send({"broke_off": str(error)})
            if not source.failed:
                gather_the_rest(gathered)
            raise
        finally:
            for receiver in receivers:
                receiver.channel.close()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        if self._meeting is not None:
            self._meeting.leave()
            self._meeting = None

    # -- one update ----------------------------------------------------------------------------

    def _send(
        self,
        manifest: WeightManifest,
        layout: Layout,
        source: Iterator[tuple[str, Tensor]],
        receivers: list[_Receiver],
    ) -> None:
        ring = self._ring_for(layout)
        for receiver in receivers:
            self._greet(receiver, manifest, layout, ring)
        # Buckets are announced by a thread: it waits for their copies while the next tensors are gathered.
        with ThreadPoolExecutor(1) as announcer:
            announced: Future[None] | None = None
            for number, places in enumerate(layout.buckets):
                self._await(manifest, receivers, number - ring.slots + 1)
                bucket = self._writer.start(ring, number)
                for place in places:
                    _, tensor = next(source)
                    bucket.put(place, tensor)
                if number == len(layout.buckets) - 1:
                    # What is left over is found before the last bucket makes the update whole.
                    gather_the_rest(source)
                if announced is not None and announced.done():
                    announced.result()
                announced = announcer.submit(self._announce, bucket.finish(), receivers)
            if announced is None:
                gather_the_rest(source)
            else:
                announced.result()
        self._await(manifest, receivers, len(layout.buckets))
        faults = [f"{r.who} {r.fault}" for r in receivers if r.fault is not None]
        if faults:
            raise WeightSyncError(
                f"weight update {manifest.version} reached {len(receivers) - len(faults)} of "
                f"{len(receivers)} receivers: {'; '.join(faults)}",
                hint="the old weights stay in force there; send the update again",
            )

    def _connect(self, manifest: WeightManifest) -> list[_Receiver]:
        """A connection to every receiver that is alive; waits for the first."""
        if self._meeting is None:
            self._meeting = self._meet()
        deadline = time.monotonic() + self._config.timeout
        while True:
            found = [self._reach(path) for path in self._meeting.receivers()]
            receivers = [receiver for receiver in found if receiver is not None]
            if receivers:
                return receivers
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight update {manifest.version} has nobody to go to: no receiver registered at "
                    f"{self._meeting.directory} within {self._config.timeout:g} seconds",
                    hint="shared_memory joins processes of one machine and one run: check where the rollout runs, "
                    "or set rollout.weight_transport=disk",
                )
            time.sleep(_POLL_SECONDS)

    def _reach(self, path: Path) -> _Receiver | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._config.timeout)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            path.unlink(missing_ok=True)  # its process has ended
            return None
        return _Receiver(who_of(path), Channel(connection, self._config.timeout))

    def _greet(
        self, receiver: _Receiver, manifest: WeightManifest, layout: Layout, ring: Ring
    ) -> None:
        hello = {
            "version": manifest.version,
            "update_id": manifest.update_id,
            "fingerprint": layout.fingerprint,
            "ring": ring.name,
            "slots": ring.slots,
            "slot_bytes": ring.slot_bytes,
        }
        self._tell(receiver, hello, self._memory)

    def _announce(self, written: Written, receivers: list[_Receiver]) -> None:
        digests = [f"{digest:016x}" for digest in written.wait()]
        for receiver in receivers:
            self._tell(receiver, {"bucket": written.number, "digests": digests})

    def _tell(
        self, receiver: _Receiver, message: dict[str, object], descriptor: int | None = None
    ) -> None:
        if receiver.fault is not None:
            return
        try:
            receiver.channel.send(message, descriptor)
        except PeerGone:
            return  # whoever waits for its answer reads its last words first
        except TimeoutError:
            receiver.fault = f"read nothing for {self._config.timeout:g} seconds"

    def _await(self, manifest: WeightManifest, receivers: list[_Receiver], count: int) -> None:
        """Wait until every receiver that still takes part is done with so many buckets."""
        deadline = time.monotonic() + self._config.timeout
        for receiver in receivers:
            while receiver.done < count and receiver.fault is None:
                if not self._hear(receiver, deadline):
                    receiver.fault = (
                        f"did not come within {self._config.timeout:g} seconds: it has taken "
                        f"{receiver.done} buckets"
                    )
        if all(receiver.fault is not None for receiver in receivers):
            faults = "; ".join(f"{r.who} {r.fault}" for r in receivers)
            raise NobodyLeftError(
                f"weight update {manifest.version} reached none of {len(receivers)} receivers: {faults}",
                hint="the old weights stay in force; send the update again when the rollout is there",
            )

    def _hear(self, receiver: _Receiver, deadline: float) -> bool:
        """Take the next message of a receiver; False where none came in time."""
        try:
            message = receiver.channel.receive(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            return False
        except PeerGone:
            receiver.fault = receiver.fault or "ended or closed its end during the update"
            return True
        if "refused" in message:
            receiver.fault = f"refused it: {message['refused']}"
        else:
            receiver.done = int(message["done"])
        return True

    def _ring_for(self, layout: Layout) -> Ring:
        """The ring, made anew where the one there is has too small slots; kept between updates."""
        ring = self._ring
        if ring is None or ring.slot_bytes < layout.slot_bytes:
            if ring is not None:
                ring.close()
                self._ring = None
            if self._memory is not None:
                os.close(self._memory)
                self._memory = None
            slots = self._config.buckets
            self._memory = new_memory(slots * layout.slot_bytes)
            ring = self._ring = Ring(self._memory, slots, layout.slot_bytes, new_name())
        return ring


class _Source(Iterator[tuple[str, Tensor]]):
    """The tensors, and whether it was they that failed."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.failed = False

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise
