"""Rendezvous over TCP: receivers connect to the sender with the address and password from the manifest.

The sender listens at one address only. Its port and the password are new in every process; a connection without the
password is closed. Messages are not encrypted, so the network must be one that you trust.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import attrs

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail_transports.ring.channel import Channel, PeerGone
from dovetail_transports.ring.peers import Peer
from dovetail_transports.ring.rendezvous import ReceiverRendezvous, SenderRendezvous

_REMEMBERED = 64
"""Number of finished updates that are remembered, since a receiver may still connect for one of them."""


_BACKLOG = 256
_PASSWORD_SECONDS = 5.0
_LONGEST_GREETING = 8192
_LONGEST_REASON = 1000
"""Maximum size of the reason why an update is called off, in bytes of UTF-8; JSON's escapes may make it six times as long, which must
still fit `_LONGEST_GREETING`."""
_MAX_SILENT = 256
"""Maximum number of connections that have not sent the password yet; a further connection closes the oldest."""
_AGAIN_SECONDS = 0.2
_OUT_OF_FILES_SECONDS = 0.2


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens at a free port of this address only.

    Raises:
        ConfigError: the address does not belong to this machine.
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
            f"rollout.weight_transport.host={host!r} is not an address at which this machine can listen: {error}",
            hint="set it to an address of the machine of the trainer's rank 0",
        ) from error
    return listener


class TcpSenderRendezvous(SenderRendezvous):
    """Accepts the receivers' TCP connections for a sender, from the first call of `prepare` or `begin` on. A thread reads each connection.

    Args:
        host: the address to listen at.
    """

    counted = True

    def __init__(self, host: str) -> None:
        self._host = host
        self._password = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._registry = ReceiverRegistry()
        self._silent: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        self.hint = (
            f"check that the rollouts run, and that they can reach {host}: "
            "rollout.weight_transport.host names the address for rollouts on other machines"
        )

    @property
    def place(self) -> str:
        return f"{self._host}:{self._listening().getsockname()[1]}"

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        return attrs.evolve(manifest, rendezvous=f"{self.place}/{self._password}")

    def begin(self, manifest: WeightManifest) -> None:
        self._listening()
        self._registry.begin(manifest.update_id)

    def finish(self, manifest: WeightManifest, reason: str) -> None:
        self._registry.finish(manifest.update_id, reason)

    def called_off(self, manifest: WeightManifest) -> str | None:
        return self._registry.called_off(manifest.update_id)

    def arrivals(self, patience: float) -> list[Peer]:
        found = self._registry.arrivals()
        for peer in found:
            peer.channel.wait_at_most(patience)
        return found

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
            listener.close()
            self._registry.close()

    def _listening(self) -> socket.socket:
        if self._listener is None:
            self._listener = listen_at(self._host)
            threading.Thread(
                target=self._serve, args=(self._listener,), name="dovetail-rendezvous", daemon=True
            ).start()
        return self._listener

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is not listener:
                    return  # the rendezvous was closed
                if not isinstance(error, ConnectionAbortedError):
                    # For example, too many files are open: connections wait until some are closed.
                    time.sleep(_OUT_OF_FILES_SECONDS)
                continue
            with self._lock:
                if len(self._silent) == _MAX_SILENT:
                    # A receiver sends the password at once, so the oldest connection is the least likely to be a receiver.
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # `_hear` closes it
                self._silent[connection] = None
            threading.Thread(
                target=self._hear, args=(connection,), name="dovetail-receiver", daemon=True
            ).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            _set_up(connection)
            channel = Channel(connection, _PASSWORD_SECONDS)
            greeting = _greeting(channel)
        except OSError:
            connection.close()
            return
        finally:
            with self._lock:
                self._silent.pop(connection, None)
        if not hmac.compare_digest(str(greeting.get("password")).encode(), self._password.encode()):
            channel.close()
            return
        self._registry.enter(greeting, channel)


def call_off(manifest: WeightManifest, reason: str) -> None:
    """Notify an update's sender that a receiver will not connect, and wait for the sender's acknowledgement.

    Args:
        manifest: the manifest that the sender's `prepare` returned.
        reason: the reason; its first 1000 bytes are sent.

    Raises:
        WeightSyncError: the sender is gone, or does not listen.
    """
    message = reason.encode()[:_LONGEST_REASON].decode(errors="ignore")
    place, _, password = (manifest.rendezvous or "").rpartition("/")
    host, _, port = place.rpartition(":")
    try:
        channel = Channel(
            socket.create_connection((host, int(port)), _PASSWORD_SECONDS), _PASSWORD_SECONDS
        )
        try:
            channel.send(
                {"password": password, "update": manifest.update_id, "called_off": message}
            )
            channel.receive(_PASSWORD_SECONDS, longest=_LONGEST_GREETING)
        finally:
            channel.close()
    except (OSError, ValueError, PeerGone) as error:
        raise WeightSyncError(
            f"weight update {manifest.version} is cancelled, but its sender at {place or 'an unknown address'} could not be notified: "
            f"{str(error) or 'it gave no answer'}"
        ) from error


def _greeting(channel: Channel) -> dict[str, Any]:
    try:
        return channel.receive(_PASSWORD_SECONDS, longest=_LONGEST_GREETING)
    except (PeerGone, TimeoutError):
        return {}


class TcpReceiverRendezvous(ReceiverRendezvous):
    """Connects a receiver to its sender over TCP, at the address in the manifest of each update.

    Args:
        who: the receiver's name in messages.
    """

    hint = (
        "check that the trainer runs and, if it is on another machine, its rollout.weight_transport.host; "
        "or raise rollout.weight_transport.timeout"
    )

    def __init__(self, who: str) -> None:
        self._who = who
        self._place = "an unknown address"
        self._last: str | None = None

    @property
    def place(self) -> str:
        return self._place

    def accept(self, manifest: WeightManifest, timeout: float, patience: float) -> Channel:
        if manifest.rendezvous is None:
            raise WeightSyncError(
                f"the manifest of weight update {manifest.version} has no address of its sender",
                hint="pass receivers the manifest that the sender's `prepare` returned",
            )
        if timeout <= 0:
            raise TimeoutError
        if self._last == manifest.update_id:
            time.sleep(min(_AGAIN_SECONDS, timeout))  # the sender answered with another update
        self._last = manifest.update_id
        self._place, _, password = manifest.rendezvous.rpartition("/")
        host, _, port = self._place.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout)
        except (ConnectionRefusedError, socket.gaierror, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise WeightSyncError(
                f"weight update {manifest.version} did not arrive: its sender can't be reached at {self._place}: {error}",
                hint=self.hint,
            ) from error
        _set_up(connection)
        channel = Channel(connection, patience)
        greeting: dict[str, Any] = {
            "password": password,
            "who": self._who,
            "update": manifest.update_id,
        }
        try:
            channel.send(greeting)
        except PeerGone as error:
            channel.close()
            raise TimeoutError from error
        return channel

    def close(self) -> None:
        """Do nothing, since no connection is open between updates."""


def _set_up(connection: socket.socket) -> None:
    # Messages are small and the other side waits for them, so the kernel must not delay them.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A failed machine closes no connection; only unanswered probes show its failure.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class ReceiverRegistry:
    """Stores the receivers that have connected. The threads that accept receivers add them, and the sending thread reads them.

    A receiver that names a future update waits until that update starts. A receiver that names a past update is sent
    the reason why the update ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: str | None = None
        self._waiting: list[tuple[str | None, Peer]] = []
        self._over: dict[str, str] = {}
        self._off: dict[str, str] = {}

    def begin(self, update_id: str) -> None:
        """Start an update, so that `arrivals` returns its receivers."""
        with self._lock:
            self._current = update_id

    def finish(self, update_id: str, reason: str) -> None:
        """End an update; late receivers are sent the reason."""
        with self._lock:
            self._over[update_id] = reason
            for book in (self._over, self._off):
                while len(book) > _REMEMBERED:
                    del book[next(iter(book))]
            late = [peer for wanted, peer in self._waiting if wanted == update_id]
            self._waiting = [entry for entry in self._waiting if entry[0] != update_id]
        for peer in late:
            self._send_away(peer.channel, update_id, reason)

    def called_off(self, update_id: str) -> str | None:
        """Return why a receiver of this update will not connect; None if no receiver has said so."""
        with self._lock:
            return self._off.get(update_id)

    def arrivals(self) -> list[Peer]:
        """Return the receivers that have connected for the running update since the last call."""
        with self._lock:
            found = [peer for wanted, peer in self._waiting if wanted in (None, self._current)]
            self._waiting = [e for e in self._waiting if e[0] not in (None, self._current)]
        return found

    def enter(self, greeting: dict[str, Any], channel: Channel) -> None:
        """Add a receiver whose greeting had the right password; if the greeting calls an update off, only record its reason."""
        update_id = greeting.get("update")
        update_id = None if update_id is None else str(update_id)
        with self._lock:
            reason = self._over.get(update_id or "")
            if "called_off" in greeting:
                self._off[update_id or ""] = str(greeting["called_off"])
            elif reason is None:
                self._waiting.append((update_id, Peer(str(greeting.get("who")), channel)))
                return
        if "called_off" in greeting:
            _answer(channel, {"heard": True})
        else:
            self._send_away(channel, update_id, str(reason))

    def close(self) -> None:
        """Close the channels of waiting receivers."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, peer in waiting:
            peer.channel.close()

    def _send_away(self, channel: Channel, update_id: str | None, reason: str) -> None:
        off = self.called_off(update_id or "") is not None
        _answer(channel, {"over": reason, "update_id": update_id, "called_off": off})


def _answer(channel: Channel, message: dict[str, Any]) -> None:
    with suppress(PeerGone, TimeoutError, OSError):
        channel.send(message)
    channel.close()
