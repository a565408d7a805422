"""The time limit of a server that a replica starts."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from dovetail.errors import RolloutError
from dovetail.metrics import Metric
from dovetail.workers import turn_path
from dovetail.workers.loading import loading_turn
from dovetail_sdk.testing.fake_server import words_of
from dovetail_serving import Failures, OwnServer, ServerBackend, ServerConnection, own_server
from dovetail_serving.testing import frame_of


class Connection:
    """A connection that answers when no process holds the loading turn."""

    def __init__(self, turn: Path) -> None:
        self._turn = turn

    async def health(self) -> int:
        if self._turn.exists():
            raise httpx2.ConnectError("it does not listen yet")
        return int(httpx2.codes.OK)

    async def ask(self, _: str) -> None:
        """Answer the description path."""


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
            await asyncio.sleep(0)  # let the task begin
            clock.now = 1000.0
        await ready

    try:
        asyncio.run(started())
    finally:
        server.close()


class Ports(ServerBackend):
    """A backend whose first servers find their ports taken; a later server is the one at `url`.

    Args:
        taken: the number of servers whose port is taken.
        url: the address of the server that answers in the end.
    """

    engine = "Engine"
    token_variable = "ENGINE_TOKEN"

    def __init__(self, taken: int, url: str, directory: Path, port: int | None = None) -> None:
        config: Any = SimpleNamespace(urls=(), port=port, start_timeout=60.0)
        context: Any = SimpleNamespace(rank=0, transport=None)
        super().__init__(config, context)
        self.started: list[OwnServer] = []
        self._taken, self._answers, self._directory = taken, url, directory

    def start_server(self, token: str) -> OwnServer:
        number = len(self.started)
        run = (
            "import sys; sys.exit('[Errno 98] Address already in use')"
            if number < self._taken
            else "import time; time.sleep(600)"
        )
        server = OwnServer(
            [sys.executable, "-c", run],
            port=1 if number < self._taken else int(self._answers.rpartition(":")[2]),
            log=self._directory / f"log{number}",
            environment={},
            failures=Failures("Engine", re.compile("^$"), ()),
            config=self.config,
        )
        self.started.append(server)
        return server

    async def join(self, connection: ServerConnection) -> None:
        raise NotImplementedError

    def metrics_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        raise NotImplementedError


def test_a_server_whose_free_port_was_taken_starts_again_at_another(
    tmp_path: Path, fake: Any
) -> None:
    fake.answers["/health"] = words_of({})
    fake.answers["/dovetail/v1/describe"] = frame_of({})
    backend = Ports(2, fake.url, tmp_path)
    backend.start()
    try:
        assert backend.url == fake.url
        assert [server.ended() is None for server in backend.started] == [False, False, True]
    finally:
        backend.close()


@pytest.mark.parametrize(("port", "starts"), [(None, 3), (9, 1)])
def test_a_port_that_stays_taken_is_named(
    port: int | None, starts: int, tmp_path: Path, fake: Any
) -> None:
    backend = Ports(9, fake.url, tmp_path, port)
    with pytest.raises(RolloutError, match="another process"):
        backend.start()
    assert len(backend.started) == starts
