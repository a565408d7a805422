"""The rendezvous of `nccl`: connections without the password are closed and do not stop an update."""

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
from dovetail_transports.nccl.tcp_rendezvous import (
    TcpReceiverRendezvous,
    TcpSenderRendezvous,
    call_off,
    listen_at,
)
from dovetail_transports.ring.peers import Peer


@pytest.fixture
def rendezvous() -> Iterator[TcpSenderRendezvous]:
    rendezvous = TcpSenderRendezvous("127.0.0.1")
    yield rendezvous
    rendezvous.close()


def connect(rendezvous: TcpSenderRendezvous, body: bytes) -> socket.socket:
    """A connection that has sent this as its first message."""
    host, _, port = rendezvous.place.rpartition(":")
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
def test_a_connection_without_the_password_is_closed(
    rendezvous: TcpSenderRendezvous, body: bytes
) -> None:
    with connect(rendezvous, body) as connection:
        assert rendezvous.arrivals(1.0) == []
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.parametrize("count", [20, 300])
def test_silent_connections_delay_no_receiver(
    rendezvous: TcpSenderRendezvous, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("dovetail_transports.nccl.tcp_rendezvous._PASSWORD_SECONDS", 3600.0)
    manifest = rendezvous.prepare(WeightManifest(version=1, tensors=()))
    host, _, port = rendezvous.place.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(count)]
    rendezvous.begin(manifest)
    channel = TcpReceiverRendezvous("rollout.0").accept(manifest, 60.0, 60.0)
    found: list[Peer] = []
    while not found:
        time.sleep(0.01)
        found = rendezvous.arrivals(1.0)
    assert [peer.who for peer in found] == ["rollout.0"]
    for connection in silent:
        connection.close()
    found[0].channel.close()
    channel.close()


def test_a_failed_accept_does_not_stop_the_next(
    rendezvous: TcpSenderRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfFiles(socket.socket):
        failed = False

        def accept(self) -> Any:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(
        "dovetail_transports.nccl.tcp_rendezvous.listen_at",
        lambda host: OutOfFiles(fileno=listen_at(host).detach()),
    )
    manifest = rendezvous.prepare(WeightManifest(version=1, tensors=()))
    call_off(manifest, "gone")
    assert rendezvous.called_off(manifest) == "gone"
