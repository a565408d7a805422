"""Dovetail's routes of a server, without an engine: authorization, and refused requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_app import VllmRoutes
from dovetail_serving import MEDIA_TYPE
from dovetail_serving.frames import pack, unpack


class Engine:
    """Dead, and with nothing configured."""

    vllm_config = SimpleNamespace()
    errored = True

    async def reset_prefix_cache(self) -> None:
        raise RuntimeError("the engine is gone")


async def vllms_own(_: Any, __: Any, send: Any) -> None:
    """What vLLM's application would answer."""
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def ask(path: str, content: bytes = b"", media_type: str = MEDIA_TYPE, **headers: str) -> Any:
    """The answer to one request."""
    import httpx2

    headers["content-type"] = media_type

    routes = VllmRoutes(vllms_own)
    state = SimpleNamespace(engine_client=Engine(), args=SimpleNamespace())

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = SimpleNamespace(state=state)
        await routes(scope, receive, send)

    async def act() -> Any:
        transport = httpx2.ASGITransport(app=application)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(act())


def test_other_paths_are_vllms() -> None:
    assert ask("/v1/completions").status_code == 418


def test_only_who_knows_the_token_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        answer = ask("/dovetail/v1/abort", pack({"calls": []}), **headers)
        assert answer.status_code == 401
    answer = ask("/dovetail/v1/abort", pack({"calls": []}), authorization="Bearer secret")
    assert (answer.status_code, unpack(answer.content).header) == (200, {})


@pytest.mark.parametrize("path", ["generate", "abort"])
def test_garbage_is_refused_in_words(path: str) -> None:
    answer = ask(f"/dovetail/v1/{path}", b"garbage and more of it")
    assert answer.status_code in {400, 500}
    assert answer.json()["kind"] == "RolloutError"


def test_calls_that_make_no_sense_are_refused() -> None:
    answer = ask("/dovetail/v1/generate", pack({"calls": [["a", 0, 0, None]], "samplings": []}))
    assert answer.status_code == 400
    assert "can't be read" in answer.json()["error"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["generate", "abort", "connect"])
def test_what_any_web_page_may_send_is_refused(path: str, media_type: str) -> None:
    answer = ask(f"/dovetail/v1/{path}", pack({"calls": []}), media_type)
    assert answer.status_code == 415
    assert MEDIA_TYPE in answer.json()["error"]


def test_a_server_without_a_token_runs_no_file_that_a_request_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    transport = {"name": None, "path": "/somewhere/transport.py", "attribute": "T", "config": {}}
    answer = ask("/dovetail/v1/connect", pack({"info": {"transport": transport, "context": {}}}))
    assert answer.status_code == 500
    assert "transport.py" in answer.json()["error"]
    assert TOKEN_VARIABLE in answer.json()["error"]


def test_an_unknown_path_is_refused() -> None:
    assert ask("/dovetail/v1/dance").status_code == 404


def test_what_the_engine_raises_travels_by_name() -> None:
    answer = ask("/dovetail/v1/reset_cache", pack({}))
    assert answer.status_code == 500
    assert answer.json() == {"error": "the engine is gone", "kind": "RuntimeError"}


def test_a_vllm_that_labels_no_tokens_keeps_no_requests_over_an_update() -> None:
    answer = ask("/dovetail/v1/freeze")
    assert answer.status_code == 500
    assert "does not report which weights produced a token" in answer.json()["error"]
