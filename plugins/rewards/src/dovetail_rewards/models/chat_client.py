"""ChatClient: one chat request to an OpenAI-compatible endpoint, and its answer or failure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.interfaces import Failure, FailureKind
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.managers.http_post import HttpPost, PostError, credential
from dovetail_rewards.urls import without_secrets
from dovetail_rollouts import finite_float

LONGEST_PAUSE = 60.0
"""Maximum seconds to wait before a retry, whatever the endpoint's `Retry-After` says."""


@attrs.frozen(kw_only=True)
class ChatReply:
    """A judge's answer."""

    text: str
    tokens: float | None
    """Tokens that the call used; None if the endpoint does not report them."""


@attrs.frozen(kw_only=True)
class Refusal:
    """The reason why the judge did not answer."""

    failure: Failure
    """The failure; `retryable` if another request may succeed."""
    pause: float = 0.0
    """Seconds to wait before the next request, as the endpoint asks."""


class ChatClient:
    """Posts chats to `<url>/chat/completions`.

    Args:
        config: the endpoint, model, sampling parameters and credential.

    Raises:
        ConfigError: the environment lacks the credential.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        secret = credential(config.auth_env, "judge")
        self._post = HttpPost(
            f"{config.url.rstrip('/')}/chat/completions",
            {} if secret is None else {"Authorization": f"Bearer {secret}"},
            config.request_timeout,
        )

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> ChatReply | Refusal:
        """Send one request and return the judge's answer; failures of the endpoint are returned, not raised."""
        try:
            return self._read(await self._post.post(json.dumps(self._body(messages)).encode()))
        except PostError as none:
            pause = _seconds(none.retry_after)
            return self._refusal(none.kind, none.what, retryable=none.retryable, pause=pause)

    def close(self) -> None:
        """Close the open connections."""
        self._post.close()

    def _body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": list(messages)}
        if config.temperature is not None:
            body["temperature"] = config.temperature
        if config.max_tokens is not None:
            body["max_tokens"] = config.max_tokens
        return {**body, **config.extra_body}

    def _read(self, content: bytes) -> ChatReply | Refusal:
        try:
            body = json.loads(content)
            text = body["choices"][0]["message"]["content"]
            usage = body.get("usage") or {}
            tokens = finite_float(usage.get("total_tokens"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            text = tokens = None
        if not isinstance(text, str):
            what = f"answered with {content[:80]!r}; expected a chat completion"
            return self._refusal(FailureKind.INVALID_VALUE, what, retryable=True)
        return ChatReply(text=text, tokens=tokens if tokens is None or tokens >= 0 else None)

    def _refusal(
        self, kind: FailureKind, what: str, *, retryable: bool, pause: float = 0.0
    ) -> Refusal:
        failure = Failure(
            kind=kind,
            message=f"judge {without_secrets(self._post.url)} {what}",
            retryable=retryable,
        )
        return Refusal(failure=failure, pause=pause)


def _seconds(header: str | None) -> float:
    """Return the value of `Retry-After` in seconds; 0 if the header is absent or a date."""
    try:
        seconds = float(header or 0.0)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE) if seconds == seconds else 0.0
