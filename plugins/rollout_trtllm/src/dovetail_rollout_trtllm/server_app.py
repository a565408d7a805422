"""What a server answers: Dovetail's paths over its engine, and below them TensorRT-LLM's own or next to nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

from dovetail.serving import Application, Host, Receive, Routes, Scope, Send
from dovetail_rollout_trtllm.driver import Driver
from dovetail_rollout_trtllm.surroundings import TOKEN_VARIABLE
from dovetail_rollout_trtllm.versions import installed

REFUSED = frozenset({"/update_weights", "/release_memory", "/resume_memory"})
"""TensorRT-LLM's own paths for weights and memory: they take pickled handles, some releases from anybody, and would change
what the rollout keeps books of."""


class DovetailRoutes(Routes):
    """Dovetail's paths.

    Args:
        app: what answers the others.
        make: the host of the engine.
    """

    token_variable = TOKEN_VARIABLE

    def __init__(self, app: Application, make: Callable[[], Host]) -> None:
        super().__init__(app)
        self._make = make

    def make_host(self, scope: Scope) -> Host:
        return self._make()


class OwnPaths:
    """`/health` (200 while the engine lives, 503 afterwards), `/version`, and whatever `app` answers beside.

    Args:
        driver: of the engine.
        app: TensorRT-LLM's own application, or None.
    """

    def __init__(self, driver: Driver, app: Application | None) -> None:
        self._driver, self._app = driver, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path == "/health":
            dead = self._driver.dead
            await _answer(send, 200 if dead is None else 503, {"error": dead})
        elif scope["type"] == "http" and path == "/version":
            await _answer(send, 200, {"version": str(installed())})
        elif scope["type"] == "http" and path in REFUSED:
            said = f"{path} is closed: weights and memory are the run's"
            await _answer(send, 403, {"error": said})
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await _answer(send, 404, {"error": f"no path {path}"})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _answer(send: Send, status: int, value: dict[str, str | None]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
