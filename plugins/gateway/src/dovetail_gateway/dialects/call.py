"""Calls of the policy and their answers, in a form independent of any API."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from dovetail.errors import DovetailError
from dovetail.interfaces import Message, MessageCall

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}  # fmt: skip


class ApiError(DovetailError, RuntimeError):
    """An error with which a call is answered.

    Args:
        status: the HTTP status.
        code: the error's name, by which it is counted.
        message: the description of the error.
        param: the request's field at fault; None if the error is not about a field.
        retry: whether the client may try again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry


@attrs.frozen(kw_only=True)
class ModelCall:
    """A program's call of the policy."""

    model: str
    messages: Sequence[Message]
    """The messages in the form of chat templates; `content` is text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools' JSON schemas, in the form of OpenAI's chat completions."""
    may_call: bool = True
    """Whether the answer is searched for tool calls."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    log_probs: bool = False
    stream: bool = False
    unapplied: tuple[str, ...] = ()
    """Names of the call's fields that have no effect: sampling fields, which the run's config decides, and fields that require a format
    or a tool call of the answer, which are not enforced."""
    body: Mapping[str, Any] = attrs.field(factory=dict)
    """The body of the request, as it was sent."""


@attrs.frozen(kw_only=True)
class ModelAnswer:
    """One answer of the policy to a call."""

    content: str
    reasoning: str | None = None
    calls: Sequence[MessageCall] = ()
    finish: str = "stop"
    """The finish reason: `stop`, `length` or `tool_calls`."""
    stopped_by: str | None = None
    """The stop string, one of the call's `stop`, at which the answer ended; None if it ended otherwise."""
    prompt_tokens: int
    tokens: int
    """The number of tokens that the policy produced."""
    log_probs: Sequence[tuple[str, float]] = ()
    """Text and log-probability (nats) of each token of the answer."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message, in the form in which later calls are expected to repeat it."""
        return assistant(self.content, self.reasoning, self.calls)


class Dialect(ABC):
    """The API of one provider: reads requests, and writes answers, events and errors in the provider's form.

    Attributes:
        path: the path of the API's requests.
        prefix: the prefix of the answers' ids.
    """

    path: ClassVar[str]
    prefix: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Parse the body of a request into a call of the policy.

        Raises:
            ApiError: the request is invalid, or uses an unsupported feature.
        """

    @abstractmethod
    def write(self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        """Return the body of a response.

        Args:
            call: the answered call.
            name: id of the response.
            answers: the policy's answers, as many as the call requested.
        """

    @abstractmethod
    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        """Yield the events of a streamed response, each as event type (None if the API has no types) and data."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error's response, in OpenAI's form unless the API has another form."""
        default = "invalid_request_error" if error.status < 500 else "server_error"
        kind = _TYPES.get(error.status, default)
        found = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        return {"error": found}


def new_id(prefix: str) -> str:
    """Return a unique id that begins with the prefix."""
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def assistant(
    content: str, reasoning: str | None, calls: Sequence[MessageCall] = ()
) -> dict[str, Any]:
    """Return an assistant's message in the form of chat templates; reasoning and tool calls are included if there are any."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def arguments_text(call: MessageCall) -> str:
    """Return the arguments of a tool call as JSON text, as APIs send them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
