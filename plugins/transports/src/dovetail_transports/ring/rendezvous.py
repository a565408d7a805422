"""Rendezvous: how the two sides of an update connect. The interface, and the rendezvous within one machine."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from dovetail.interfaces import WeightManifest
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.peers import Peer
from dovetail_transports.ring.rendezvous_directory import RendezvousDirectory, who_of

_ONE_MACHINE = "this transport connects processes of one machine and one run"


class SenderRendezvous(ABC):
    """The trainer's side of a rendezvous, which makes the connections to the receivers at the start of each update."""

    counted: ClassVar[bool] = False
    """Whether the number of receivers must be known in advance, since receivers connect only when an update starts."""
    hint: str
    """Advice for the user, shown with the error that is raised if too few receivers connect."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The address at which receivers connect, as text."""

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest with the data that receivers need to connect, such as the sender's address; by default unchanged."""
        return manifest

    def begin(self, manifest: WeightManifest) -> None:
        """Start an update. From here on, `arrivals` returns the receivers that connect for this update."""

    def finish(self, manifest: WeightManifest, reason: str) -> None:
        """End the update; receivers that connect later are sent the reason."""

    def called_off(self, manifest: WeightManifest) -> str | None:
        """Return why a receiver of this update will not connect; None if no receiver has said so."""
        return None

    @abstractmethod
    def arrivals(self, patience: float) -> list[Peer]:
        """Return the receivers that connected since the last call, without waiting.

        Args:
            patience: the time limit, in seconds, for each message sent to these receivers later.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class ReceiverRendezvous(ABC):
    """A rollout's side of a rendezvous, which makes the connection to the sender at the start of each update."""

    hint: str
    """Advice for the user, shown with the error that is raised if no sender connects."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The address at which this side waits for senders, as text for errors."""

    @abstractmethod
    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        """Wait for the next sender, and return its channel.

        Args:
            manifest: the manifest of the awaited update.
            timeout: seconds to wait.
            patience: seconds that the sender may take to read a message.

        Raises:
            TimeoutError: no sender connected in time.
            WeightSyncError: the sender can't be reached, or the manifest lacks its address.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class LocalSenderRendezvous(SenderRendezvous):
    """Connects a sender to the receivers on its machine. Each receiver listens at a socket; a directory holds all these sockets.

    Args:
        join: a function that joins the run's rendezvous directory and returns it, called on first use.
    """

    hint = f"{_ONE_MACHINE}: check where the rollout runs, or set rollout.weight_transport=disk"

    def __init__(self, join: Callable[[], RendezvousDirectory]) -> None:
        self._join = join
        self._directory: RendezvousDirectory | None = None
        self._known: set[Path] = set()
        self._last: str | None = None

    @property
    def place(self) -> str:
        return str(self._joined().directory)

    def begin(self, manifest: WeightManifest) -> None:
        self._known = set()
        # Not in `finish`, since senders on other machines may not have read the note by then.
        if self._last is not None:
            self._joined().forget(self._last)
        self._last = manifest.update_id

    def called_off(self, manifest: WeightManifest) -> str | None:
        return self._joined().called_off(manifest.update_id)

    def arrivals(self, patience: float) -> list[Peer]:
        found = []
        for path in self._joined().receivers():
            if path in self._known:
                continue
            peer = _reach(path, patience)
            if peer is not None:
                self._known.add(path)
                found.append(peer)
        return found

    def close(self) -> None:
        if self._directory is not None:
            self._directory.leave()
            self._directory = None

    def _joined(self) -> RendezvousDirectory:
        if self._directory is None:
            self._directory = self._join()
        return self._directory


class LocalReceiverRendezvous(ReceiverRendezvous):
    """Accepts connections of senders on the same machine, at a socket in a directory, from its construction on.

    Args:
        directory: the joined directory; `close` leaves the directory.
        who: the receiver's name in messages.
    """

    hint = (
        f"{_ONE_MACHINE}: check where the trainer runs, or raise rollout.weight_transport.timeout"
    )

    def __init__(self, directory: RendezvousDirectory, who: str) -> None:
        self._directory = directory
        try:
            self._listener = directory.listen(who)
        except BaseException:
            directory.leave()
            raise

    @property
    def place(self) -> str:
        return str(self._directory.directory)

    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        self._listener.settimeout(max(timeout, 1e-4))
        connection, _ = self._listener.accept()
        return Channel(connection, patience)

    def close(self) -> None:
        self._listener.close()
        self._directory.leave()


def _reach(path: Path, patience: float) -> Peer | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(patience)
    try:
        connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        path.unlink(missing_ok=True)  # the receiver's process has ended
        return None
    return Peer(who_of(path), Channel(connection, patience))
