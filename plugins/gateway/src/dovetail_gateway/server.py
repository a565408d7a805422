"""Gateway: the HTTP server, which passes each call to the episode's endpoint by the call's API key."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail.errors import DovetailError
from dovetail.workers import LoopThread
from dovetail_gateway.config import GatewaySection
from dovetail_gateway.dialects.call import ApiError, Dialect, ModelAnswer, ModelCall, new_id
from dovetail_gateway.dialects.chat_completions import ChatCompletionsApi
from dovetail_gateway.dialects.messages import MessagesApi
from dovetail_gateway.dialects.responses import ResponsesApi

_KEY_PREFIX = "sk-dovetail-"
_REMEMBERED = 4096
"""Number of ended episodes whose keys are remembered, so that an error can say that the episode has ended."""
_START_SECONDS = 30.0
_BACKLOG = 2048
_ANTHROPIC = MessagesApi()
_OPENAI = ChatCompletionsApi()


class CallEndpoint(Protocol):
    """Answers the model calls that carry one API key.

    Attributes:
        loop: the event loop that runs `answer`.
    """

    loop: asyncio.AbstractEventLoop

    async def answer(self, call: ModelCall, name: str) -> list[ModelAnswer]:
        """Answer a call; `name` is the response's name. A refused call is counted and raises ApiError."""

    def refused(self, code: str) -> None:
        """Count a call that is refused because it can't be parsed; `code` is the error code of the answer."""


class Gateway:
    """Serves the endpoints of episodes, on an event loop in a separate thread.

    Args:
        config: the config with port, model names and the limit of a request's length.
        host: the interface on which the gateway listens.

    Attributes:
        url: the gateway's address, without a path.
    """

    def __init__(self, config: GatewaySection, host: str = "127.0.0.1") -> None:
        self._models = [name for name in config.models if name != "*"] or ["policy"]
        self._most = config.max_request_bytes
        self._endpoints: dict[str, CallEndpoint] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._socket = _bound(host, config.port)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        dialects = (_OPENAI, ResponsesApi(), _ANTHROPIC)
        app = Starlette(
            routes=[
                *(Route(d.path, self._served(d), methods=["POST"]) for d in dialects),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._show_model, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _no_such_path, Exception: _broken},
        )
        settings = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, server_header=False,
            backlog=_BACKLOG, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        self._thread = LoopThread("dovetail-gateway")
        self._served_to_end = self._thread.start(self._server.serve(sockets=[self._socket]))

    def open(self, endpoint: CallEndpoint, key: str | None = None) -> str:
        """Register an endpoint and return the key for its calls: `key`, or a new key. The key is valid until `close_key`."""
        key = key or _KEY_PREFIX + secrets.token_urlsafe(24)
        self._endpoints[key] = endpoint
        return key

    def close_key(self, key: str) -> None:
        """Refuse further calls with a key."""
        self._endpoints.pop(key, None)
        self._over[key] = None
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def close(self) -> None:
        """End the server and its thread; safe to call twice."""
        self._server.should_exit = True
        try:
            self._served_to_end.result(_START_SECONDS)
        finally:
            self._thread.close()
            self._socket.close()

    def _served(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            endpoint = call = None
            try:
                endpoint = self._endpoint(request)
                call = dialect.read(await self._body(request))
                name = new_id(dialect.prefix)
                answers = await _until_gone(request, endpoint, call, name)
            except ApiError as error:
                if endpoint is not None and call is None:  # other calls are counted by the endpoint
                    with suppress(RuntimeError):  # the endpoint's loop has ended
                        endpoint.loop.call_soon_threadsafe(endpoint.refused, error.code)
                return _refusal(dialect, error)
            except ClientDisconnect:
                return Response(status_code=499)  # the client is gone
            if not call.stream:
                return _json(dialect.write(call, name, answers))
            # All events are sent at once, since an engine returns a turn only when it is complete.
            text = "".join(_event(kind, data) for kind, data in dialect.events(call, name, answers))
            return Response(
                text, media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )

        return serve

    def _endpoint(self, request: Request) -> CallEndpoint:
        key = request.headers.get("x-api-key") or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else key
        if (endpoint := self._endpoints.get(key)) is not None:
            return endpoint
        what = (
            "the episode of this key has ended"
            if key in self._over
            else "the key belongs to no running episode"
        )
        hint = "each program has the key of its own episode in OPENAI_API_KEY and ANTHROPIC_API_KEY"
        raise ApiError(401, "invalid_api_key", f"{what}: {hint}")

    async def _body(self, request: Request) -> dict[str, Any]:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._most:
                message = f"the request has more than {self._most} bytes (max_request_bytes)"
                raise ApiError(413, "request_too_large", message)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ApiError(
                400, "invalid_request", f"the request's body is not JSON: {error}"
            ) from None
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_request", "the request's body is not a JSON object")
        return body

    async def _list_models(self, request: Request) -> Response:
        ends = {"has_more": False, "first_id": self._models[0], "last_id": self._models[-1]}
        return _json({"object": "list", "data": [*map(_model, self._models)], **ends})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name in self._models:
            return _json(_model(name))
        error = ApiError(
            404,
            "model_not_found",
            f"the model {name!r} does not exist; GET /v1/models lists the models",
        )
        return _refusal(_dialect(request), error)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]
        raise DovetailError(
            f"the gateway can't listen on {host}:{port}: {why}",
            hint="end the program that listens there, or set another port (rollout.agent_loop.port, or `dovetail serve --port`); port 0 picks a free one",
        ) from error


async def _until_gone(
    request: Request, endpoint: CallEndpoint, call: ModelCall, name: str
) -> list[ModelAnswer]:
    """Let an endpoint answer a call on its own event loop; the answer is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client has disconnected.
        ApiError: the call is refused, or was cancelled because the episode has ended.
    """
    work = asyncio.run_coroutine_threadsafe(endpoint.answer(call, name), endpoint.loop)
    done = asyncio.wrap_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        either: list[asyncio.Future[Any]] = [done, gone]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        if done.cancelled():
            raise ApiError(403, "episode_ended", "the episode of this key has ended")
        return done.result()
    finally:
        gone.cancel()
        done.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII, since a response may repeat half a surrogate pair from its request, which UTF-8 can't encode.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _event(kind: str | None, data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {kind}\ndata: {text}\n\n" if kind else f"data: {text}\n\n"


def _refusal(dialect: Dialect, error: ApiError) -> Response:
    # OpenAI's and Anthropic's clients retry after 429 and 5xx unless this header forbids it.
    headers = {"x-should-retry": str(error.retry).lower()}
    return _json(dialect.error(error), error.status, headers)


def _dialect(request: Request) -> Dialect:
    return _ANTHROPIC if "anthropic-version" in request.headers else _OPENAI


def _model(name: str) -> dict[str, Any]:
    """Return the description of a model for `/v1/models`, with the fields of both OpenAI's and Anthropic's APIs."""
    openai = {"object": "model", "created": 0, "owned_by": "dovetail"}
    anthropic = {"type": "model", "display_name": name, "lifecycle": "active"}
    return {"id": name, **openai, **anthropic, "created_at": "1970-01-01T00:00:00Z"}


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not supported; expected POST /v1/chat/completions, /v1/responses or /v1/messages, or GET /v1/models"
    return _refusal(_dialect(request), ApiError(error.status_code, "not_found", message))


async def _broken(request: Request, error: Exception) -> Response:
    return _refusal(
        _dialect(request),
        ApiError(500, "gateway_failed", f"the gateway failed: {type(error).__name__}"),
    )
