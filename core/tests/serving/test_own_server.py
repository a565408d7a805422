"""The time that a server of a replica's own may take to be ready."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from dovetail.serving import Failures, OwnServer, own_server
from dovetail.workers import turn_path
from dovetail.workers.loading import loading_turn


class Connection:
    """Answers once nobody holds the turn."""

    def __init__(self, turn: Path) -> None:
        self._turn = turn

    async def health(self) -> int:
        if self._turn.exists():
            raise httpx2.ConnectError("it does not listen yet")
        return int(httpx2.codes.OK)

    async def ask(self, _: str) -> None:
        """It describes itself."""


def test_the_wait_for_a_turn_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(own_server, "time", SimpleNamespace(monotonic=lambda: clock.now))
    turn = turn_path(tmp_path)
    server = OwnServer(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        port=1,
        log=tmp_path / "log",
        environment={},
        failures=Failures("a server", None, ()),
        config=SimpleNamespace(start_timeout=60.0),
        turn=turn,
    )

    async def started() -> None:
        connection: Any = Connection(turn)
        with loading_turn(tmp_path):
            ready = asyncio.create_task(server.ready(connection))
            await asyncio.sleep(0)  # it has begun
            clock.now = 1000.0
        await ready

    try:
        asyncio.run(started())
    finally:
        server.close()
