"""The door of `nccl`: strangers who do not know the password neither get in nor stop an update."""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from dovetail.interfaces import WeightManifest
from dovetail_transports.nccl.door import TcpReceiverDoor, TcpSenderDoor, call_off, listen_at
from dovetail_transports.ring.peers import Peer


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


def test_strangers_that_say_nothing_keep_nobody_waiting(
    door: TcpSenderDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail_transports.nccl.door._PASSWORD_SECONDS", 3600.0)
    manifest = door.prepare(WeightManifest(version=1, tensors=()))
    host, _, port = door.place.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    door.begin(manifest)
    channel = TcpReceiverDoor("rollout.0").accept(manifest, 60.0, 60.0)
    found: list[Peer] = []
    while not found:
        time.sleep(0.01)
        found = door.arrivals(1.0)
    assert [peer.who for peer in found] == ["rollout.0"]
    for connection in silent:
        connection.close()
    found[0].channel.close()
    channel.close()


def test_a_door_that_could_not_open_a_connection_hears_the_next(
    door: TcpSenderDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfFiles(socket.socket):
        failed = False

        def accept(self) -> Any:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(
        "dovetail_transports.nccl.door.listen_at",
        lambda host: OutOfFiles(fileno=listen_at(host).detach()),
    )
    manifest = door.prepare(WeightManifest(version=1, tensors=()))
    call_off(manifest, "gone")
    assert door.called_off(manifest) == "gone"
