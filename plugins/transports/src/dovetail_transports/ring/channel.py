"""Channel: JSON messages between a sender and one receiver over a socket, each with a time limit.

A message is its length in four bytes, then its text. Over a Unix socket a message may carry a file descriptor.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 28


class PeerGone(Exception):
    """The other side of a channel has closed the connection, or its process has ended."""


class Channel:
    """One end of a connected socket.

    One thread may send while another receives.

    Args:
        connection: the socket, which the channel closes.
        patience: seconds that the peer may take to read a message.
    """

    def __init__(self, connection: socket.socket, patience: float) -> None:
        connection.settimeout(patience)
        self._socket = connection
        # `poll` limits the time to receive, since the socket's own limit applies to sends in other threads.
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._descriptors: list[int] = []

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message, optionally with a file descriptor.

        Raises:
            TimeoutError: the peer does not read the message in time.
            PeerGone: the peer has closed the connection.
        """
        body = json.dumps(message).encode()
        data = _LENGTH.pack(len(body)) + body
        try:
            if descriptor is not None:
                # The descriptor is sent with the length only, since `send_fds` may send only a part of a longer message.
                socket.send_fds(self._socket, [data[: _LENGTH.size]], [descriptor])
                data = data[_LENGTH.size :]
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone from error

    def receive(self, timeout: float, longest: int = _MOST_BYTES) -> dict[str, Any]:
        """Return the next message, of at most `longest` bytes.

        Raises:
            TimeoutError: no message arrived in time.
            PeerGone: the peer has closed the connection, or sent a malformed or too long message.
        """
        deadline = time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > longest:
            raise PeerGone(f"the peer sent a message of {length} bytes; expected at most {longest}")
        try:
            message = json.loads(self._read(length, deadline))
        except (ValueError, RecursionError) as error:
            raise PeerGone("the peer sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise PeerGone(
                f"the peer sent a message of type {type(message).__name__}; expected a mapping"
            )
        return message

    def own_address(self) -> str:
        """Return the host address of this end of a TCP connection."""
        return str(self._socket.getsockname()[0])

    def wait_at_most(self, patience: float) -> None:
        """Set the seconds that the peer may take to read a message from now on."""
        self._socket.settimeout(patience)

    def waiting(self) -> bool:
        """Return whether data can be read: a message, a part of a message, or the end of the stream."""
        return bool(self._readable.poll(0))

    def take_descriptor(self) -> int:
        """Return the received file descriptor; the caller closes it.

        Raises:
            PeerGone: no descriptor was received.
        """
        if not self._descriptors:
            raise PeerGone("the peer sent no file descriptor")
        return self._descriptors.pop()

    def close(self) -> None:
        """Close the socket, and received descriptors that were not taken."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._socket.close()

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            if not self._readable.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise TimeoutError
            try:
                part, descriptors, _, _ = socket.recv_fds(self._socket, count - len(data), 1)
            except ConnectionResetError as error:
                raise PeerGone from error
            self._descriptors += descriptors
            if not part:
                raise PeerGone
            data += part
        return data
