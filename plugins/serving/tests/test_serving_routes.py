"""Requests to a server's routes: no more than the allowed size of a body is read."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dovetail.interfaces import FinishReason, SamplingParams
from dovetail_serving import MEDIA_TYPE, SampleCall, SampleResult
from dovetail_serving.messages import packed_calls
from dovetail_serving.routes import Host, Routes

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
    monkeypatch.setattr("dovetail_serving.routes.MAX_BODY_BYTES", 4 << 20)
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


def test_a_server_that_will_be_ended_says_so_with_its_health_and_answers_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail_serving.routes._QUIET_SECONDS", 0.2)

    class Slow:
        async def generate(self, call: SampleCall) -> SampleResult:
            await released.wait()
            return SampleResult(
                response_ids=np.arange(2, dtype=np.int64), finish_reason=FinishReason.STOP
            )

    class SlowRoutes(Routes):
        token_variable = "DOVETAIL_TEST_TOKEN"

        def make_host(self, scope: Any) -> Host:
            return Slow()  # type: ignore[return-value] - nothing else is asked of it

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    async def ask(path: str, body: bytes = b"") -> Any:
        """Send a request and return the head of the answer."""
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", MEDIA_TYPE.encode())] if body else []
        await routes({"type": "http", "path": path, "headers": headers}, receive, send)
        return sent[0]

    async def all_of() -> None:
        assert (await ask("/health"))["headers"] == [(b"a", b"b")]
        call = SampleCall(call_id="c", prompt_ids=[1], sampling=SamplingParams(max_new_tokens=2))
        generating = asyncio.create_task(ask("/dovetail/v1/generate", packed_calls({"c": call})))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(ask("/dovetail/v1/drain"))
        await asyncio.sleep(0.4)
        assert (await ask("/health"))["headers"] == [(b"a", b"b"), (b"dovetail-draining", b"1")]
        assert not draining.done()
        released.set()
        assert (await generating)["status"] == (await draining)["status"] == 200

    released = asyncio.Event()
    routes = SlowRoutes(engine)
    asyncio.run(all_of())
