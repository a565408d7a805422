"""The body of a request to a server's routes: no more of it is read than is allowed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.serving import MEDIA_TYPE
from dovetail.serving.routes import Host, Routes

PIECE = bytes(1 << 20)


class OwnRoutes(Routes):
    token_variable = "DOVETAIL_TEST_TOKEN"

    def make_host(self, scope: Any) -> Host:
        return object()  # type: ignore[return-value] - no request gets as far as to use it


@pytest.mark.parametrize(
    ("media_type", "status", "most"), [(MEDIA_TYPE, 413, 5 << 20), ("text/plain", 415, 1 << 20)]
)
def test_no_more_of_a_body_is_read_than_is_allowed(
    monkeypatch: pytest.MonkeyPatch, media_type: str, status: int, most: int
) -> None:
    monkeypatch.setattr("dovetail.serving.routes.MAX_BODY_BYTES", 4 << 20)
    read, sent = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += len(PIECE)
        return {"type": "http.request", "body": PIECE, "more_body": read < 400 << 20}

    async def send(message: Any) -> None:
        sent.append(message)

    async def engine(*_: object) -> None:
        raise AssertionError("the path is not the engine's")

    scope = {
        "type": "http",
        "path": "/dovetail/v1/load",
        "headers": [(b"content-type", media_type.encode())],
    }
    asyncio.run(OwnRoutes(engine)(scope, receive, send))
    assert sent[0]["status"] == status
    assert read <= most
