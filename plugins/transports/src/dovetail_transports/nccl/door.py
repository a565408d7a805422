"""Doors over TCP: receivers connect to the sender, whose address travels in the manifest, and show its password.

The sender listens at one address only. Its port and the password are new in every process; who does not know the password
is not heard. What is said is not encrypted: the network must be one that you trust.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import Any

import attrs

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces.transport import WeightManifest
from dovetail_transports.ring.channel import Channel, PeerGone
from dovetail_transports.ring.doors import ReceiverDoor, SenderDoor
from dovetail_transports.ring.peers import Peer

_BACKLOG = 256
_PASSWORD_SECONDS = 5.0
_LONGEST_GREETING = 1024
_AGAIN_SECONDS = 0.2


def listen_at(host: str) -> socket.socket:
    """A socket that listens at a free port of this address alone.

    Raises:
        ConfigError: it is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"rollout.weight_transport.host={host!r} is no address at which this machine can listen: {error}",
            hint="name an address of the machine of the trainer's rank 0",
        ) from error
    return listener


class TcpSenderDoor(SenderDoor):
    """Listens from the first update on.

    Args:
        host: the address to listen at.
    """

    counted = True

    def __init__(self, host: str) -> None:
        self._host = host
        self._password = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self.hint = (
            f"check that the rollouts run, and that they can reach {host}: "
            "rollout.weight_transport.host names the address for rollouts on other machines"
        )

    @property
    def place(self) -> str:
        return f"{self._host}:{self._listening().getsockname()[1]}"

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        return attrs.evolve(manifest, meeting=f"{self.place}/{self._password}")

    def arrivals(self, patience: float) -> list[Peer]:
        found: list[Peer] = []
        listener = self._listening()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return found
            peer = self._admitted(connection, patience)
            if peer is not None:
                found.append(peer)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listening(self) -> socket.socket:
        if self._listener is None:
            self._listener = listen_at(self._host)
        return self._listener

    def _admitted(self, connection: socket.socket, patience: float) -> Peer | None:
        _set_up(connection)
        channel = Channel(connection, patience)
        try:
            greeting = channel.receive(_PASSWORD_SECONDS, longest=_LONGEST_GREETING)
        except (PeerGone, TimeoutError):
            greeting = {}
        if not hmac.compare_digest(str(greeting.get("password")).encode(), self._password.encode()):
            channel.close()
            return None
        return Peer(str(greeting.get("who")), channel)


class TcpReceiverDoor(ReceiverDoor):
    """Goes where the manifest says.

    Args:
        who: tells people whose connection it is.
    """

    hint = (
        "check that the trainer runs, and its rollout.weight_transport.host where it runs on another "
        "machine, or raise rollout.weight_transport.timeout"
    )

    def __init__(self, who: str) -> None:
        self._who = who
        self._place = "no place yet"
        self._last: str | None = None

    @property
    def place(self) -> str:
        return self._place

    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        if manifest.meeting is None:
            raise WeightSyncError(
                f"weight update {manifest.version} did not say where its sender is",
                hint="hand receivers the manifest that the sender's `prepare` gave",
            )
        if timeout <= 0:
            raise TimeoutError
        if self._last == manifest.update_id:
            time.sleep(min(_AGAIN_SECONDS, timeout))  # it was another update that answered
        self._last = manifest.update_id
        self._place, _, password = manifest.meeting.rpartition("/")
        host, _, port = self._place.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout)
        except (ConnectionRefusedError, socket.gaierror, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise WeightSyncError(
                f"weight update {manifest.version} did not come: its sender can't be reached at {self._place}: {error}",
                hint=self.hint,
            ) from error
        _set_up(connection)
        channel = Channel(connection, patience)
        greeting: dict[str, Any] = {"password": password, "who": self._who}
        try:
            channel.send(greeting)
        except PeerGone as error:
            channel.close()
            raise TimeoutError from error
        return channel

    def close(self) -> None:
        """Nothing is open between updates."""


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
