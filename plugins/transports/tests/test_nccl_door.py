"""The door of `nccl`: strangers who do not know the password neither get in nor stop an update."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dovetail_transports.nccl.door import TcpSenderDoor


@pytest.fixture
def door() -> Iterator[TcpSenderDoor]:
    door = TcpSenderDoor("127.0.0.1")
    yield door
    door.close()


def knock(door: TcpSenderDoor, body: bytes) -> socket.socket:
    """A connection that has sent this as its first message."""
    host, _, port = door.place.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(struct.pack("!I", len(body)) + body)
    return connection


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1000,
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"1" * 1024,
        json.dumps({"password": "wrong", "who": "x"}).encode(),
        json.dumps({"password": None}).encode(),
    ],
    ids=["nested", "no text", "a list", "nothing", "a number", "wrong", "none"],
)
def test_a_stranger_is_turned_away(door: TcpSenderDoor, body: bytes) -> None:
    with knock(door, body) as connection:
        assert door.arrivals(1.0) == []
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
