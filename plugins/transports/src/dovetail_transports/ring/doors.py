"""Doors: how the two sides of an update reach each other. Here is the contract, and the doors within one machine."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from dovetail.interfaces import WeightManifest
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.meeting import Rendezvous, who_of
from dovetail_transports.ring.peers import Peer

_ONE_MACHINE = "this transport joins processes of one machine and one run"


class SenderDoor(ABC):
    """The trainer's side."""

    counted: ClassVar[bool] = False
    """Whether it must be told how many receivers will come, since nobody is there before an update starts."""
    hint: str
    """What to do where nobody comes."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where receivers are awaited, in words."""

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """As `WeightSender.prepare`."""
        return manifest

    def begin(self, manifest: WeightManifest) -> None:
        """A new update: everybody arrives anew."""

    def finish(self, manifest: WeightManifest, reason: str) -> None:
        """The update is over, and why: who comes for it now comes too late."""

    def called_off(self, manifest: WeightManifest) -> str | None:
        """Why a receiver of this update will not come, where somebody has said so."""
        return None

    @abstractmethod
    def arrivals(self, patience: float) -> list[Peer]:
        """Receivers that have come since the last call, at once; their channels wait so many seconds for a reader."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class ReceiverDoor(ABC):
    """A rollout's side."""

    hint: str
    """What to do where no sender comes."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where senders are awaited, in words."""

    @abstractmethod
    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        """The next sender.

        Raises:
            TimeoutError: none came in time.
            WeightSyncError: none can come.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class LocalSenderDoor(SenderDoor):
    """Looks for the sockets of receivers in a directory.

    Args:
        meet: makes the membership when it is first needed.
    """

    hint = f"{_ONE_MACHINE}: check where the rollout runs, or set rollout.weight_transport=disk"

    def __init__(self, meet: Callable[[], Rendezvous]) -> None:
        self._meet = meet
        self._meeting: Rendezvous | None = None
        self._known: set[Path] = set()

    @property
    def place(self) -> str:
        return str(self._met().directory)

    def begin(self, manifest: WeightManifest) -> None:
        self._known = set()

    def finish(self, manifest: WeightManifest, reason: str) -> None:
        self._met().forget(manifest.update_id)

    def called_off(self, manifest: WeightManifest) -> str | None:
        return self._met().called_off(manifest.update_id)

    def arrivals(self, patience: float) -> list[Peer]:
        found = []
        for path in self._met().receivers():
            if path in self._known:
                continue
            peer = _reach(path, patience)
            if peer is not None:
                self._known.add(path)
                found.append(peer)
        return found

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()
            self._meeting = None

    def _met(self) -> Rendezvous:
        if self._meeting is None:
            self._meeting = self._meet()
        return self._meeting


class LocalReceiverDoor(ReceiverDoor):
    """Listens in the directory from when it is made.

    Args:
        meeting: joined; the door leaves it.
        who: tells people whose socket it is.
    """

    hint = (
        f"{_ONE_MACHINE}: check where the trainer runs, or raise rollout.weight_transport.timeout"
    )

    def __init__(self, meeting: Rendezvous, who: str) -> None:
        self._meeting = meeting
        try:
            self._listener = meeting.listen(who)
        except BaseException:
            meeting.leave()
            raise

    @property
    def place(self) -> str:
        return str(self._meeting.directory)

    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        self._listener.settimeout(max(timeout, 1e-4))
        connection, _ = self._listener.accept()
        return Channel(connection, patience)

    def close(self) -> None:
        self._listener.close()
        self._meeting.leave()


def _reach(path: Path, patience: float) -> Peer | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(patience)
    try:
        connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        path.unlink(missing_ok=True)  # its process has ended
        return None
    return Peer(who_of(path), Channel(connection, patience))
