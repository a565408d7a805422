"""ReceiverRegistry: which receivers have come for which update, which updates are over, and which were called off."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from dovetail_transports.ring.channel import Channel, PeerGone
from dovetail_transports.ring.peers import Peer

_REMEMBERED = 64
"""Updates that are over and for which a receiver may still come."""


class ReceiverRegistry:
    """Written by the threads that accept receivers, read by the one that sends.

    A receiver of an update that has not begun waits for it; one of an update that is over is answered so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: str | None = None
        self._waiting: list[tuple[str | None, Peer]] = []
        self._over: dict[str, str] = {}
        self._off: dict[str, str] = {}

    def begin(self, update_id: str) -> None:
        """Start an update: receivers may connect for it."""
        with self._lock:
            self._current = update_id

    def finish(self, update_id: str, reason: str) -> None:
        """End an update, with the reason: late receivers are answered with the reason."""
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
        """Return why a receiver of this update will not connect; None where none has announced that."""
        with self._lock:
            return self._off.get(update_id)

    def arrivals(self) -> list[Peer]:
        """Return the receivers that have connected for the running update, each once."""
        with self._lock:
            found = [peer for wanted, peer in self._waiting if wanted in (None, self._current)]
            self._waiting = [e for e in self._waiting if e[0] not in (None, self._current)]
        return found

    def enter(self, greeting: dict[str, Any], channel: Channel) -> None:
        """Take a receiver that has shown the password and named its update."""
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
