"""ChatClient: one request to an OpenAI-compatible endpoint, and what comes of it. Nothing else of the protocol is needed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import Failure, FailureKind, finite_float
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.managers.http_service import CONNECT_TIMEOUT, RETRYABLE_STATUS

LONGEST_PAUSE = 60.0
"""Seconds that an endpoint's `Retry-After` may ask for, at most."""


@attrs.frozen(kw_only=True)
class Answer:
    """What a judge said."""

    text: str
    tokens: float | None
    """Tokens that the call used, where the endpoint tells."""


@attrs.frozen(kw_only=True)
class Refusal:
    """Why there is no answer."""

    failure: Failure
    """`retryable` where another request may do."""
    pause: float = 0.0
    """Seconds that the endpoint wants to be left alone."""


class ChatClient:
    """Posts chats to `<url>/chat/completions`. Used from one event loop.

    Args:
        config: model, sampling and credential.
        url: the endpoint's base.
        key: what it wants as a bearer token; None takes what `auth_env` names.

    Raises:
        ConfigError: the environment does not hold the credential.
    """

    def __init__(self, config: JudgeConfig, url: str, key: str | None = None) -> None:
        self._config = config
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json", **_credential(config, key)}
        self._client: Any = None

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Answer | Refusal:
        """One request; raises nothing for what the endpoint does."""
        import httpx2

        if self._client is None:
            # the limits on time are kept here, since a server may also send a byte now and then
            self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT))
        content = json.dumps(self._body(messages)).encode()
        try:
            async with asyncio.timeout(self._config.request_timeout):
                reply = await self._client.post(self._url, content=content, headers=self._headers)
        except TimeoutError:
            what = f"did not answer within {self._config.request_timeout:g} s"
            return self._refusal(FailureKind.TIMEOUT, what, retryable=True)
        except httpx2.HTTPError as error:
            what = f"can't be reached: {type(error).__name__}: {error}"
            return self._refusal(FailureKind.UNREACHABLE, what, retryable=True)
        if reply.status_code != 200:
            passes = reply.status_code in RETRYABLE_STATUS
            kind = FailureKind.UNREACHABLE if passes else FailureKind.EXCEPTION
            what = f"answered with status {reply.status_code}: {reply.text[:200]!r}"
            pause = _seconds(reply.headers.get("retry-after"))
            return self._refusal(kind, what, retryable=passes, pause=pause)
        return self._read(reply.content)

    async def close(self) -> None:
        """Close what connections there are."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": list(messages)}
        if config.temperature is not None:
            body["temperature"] = config.temperature
        if config.max_tokens is not None:
            body["max_tokens"] = config.max_tokens
        return {**body, **config.extra_body}

    def _read(self, content: bytes) -> Answer | Refusal:
        try:
            body = json.loads(content)
            text = body["choices"][0]["message"]["content"]
            usage = body.get("usage") or {}
            tokens = finite_float(usage.get("total_tokens"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            text = tokens = None
        if not isinstance(text, str):
            what = f"answered with what is no chat completion: {content[:80]!r}"
            return self._refusal(FailureKind.INVALID_VALUE, what, retryable=True)
        return Answer(text=text, tokens=tokens if tokens is None or tokens >= 0 else None)

    def _refusal(
        self, kind: FailureKind, what: str, *, retryable: bool, pause: float = 0.0
    ) -> Refusal:
        failure = Failure(kind=kind, message=f"judge {self._url} {what}", retryable=retryable)
        return Refusal(failure=failure, pause=pause)


def _credential(config: JudgeConfig, key: str | None) -> dict[str, str]:
    if key is not None:
        return {"Authorization": f"Bearer {key}"}
    if config.auth_env is None:
        return {}
    secret = os.environ.get(config.auth_env)
    if not secret:
        raise ConfigError(
            f"auth_env of reward manager 'judge' names the environment variable {config.auth_env!r}, which is not set",
            hint=f"export {config.auth_env}=…, or set auth_env=null",
        )
    return {"Authorization": f"Bearer {secret}"}


def _seconds(header: str | None) -> float:
    """`Retry-After` in seconds; 0 where it is absent or a date."""
    try:
        seconds = float(header or 0.0)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE) if seconds == seconds else 0.0
