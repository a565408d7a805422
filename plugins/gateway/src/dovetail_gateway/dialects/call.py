"""What a call asks and what it is answered, in no API's own form; and how requests are read."""

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

_SHOWN = 80
"""Characters of a wrong value in a message."""


class ApiError(DovetailError, RuntimeError):
    """A call that is not answered.

    Args:
        status: of HTTP.
        code: a name for it, by which it is counted.
        message: what was wrong.
        param: the field at fault.
        retry: whether the client may ask again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry


def invalid(param: str, value: object, expected: str) -> ApiError:
    """Return the error of a field with a wrong value."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    message = f"{param} is {shown}; expected {expected}"
    return ApiError(400, "invalid_request", message, param=param)


@attrs.frozen(kw_only=True)
class ModelCall:
    """What a program asks of the policy."""

    model: str
    messages: Sequence[Message]
    """As chat templates take them; `content` is text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas in the form of OpenAI's chat completions."""
    may_call: bool = True
    """Whether calls are looked for in the answer."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    log_probs: bool = False
    stream: bool = False
    unapplied: tuple[str, ...] = ()
    """What it asks for and does not get: sampling is the run's, and nothing forces the form of an answer."""
    body: Mapping[str, Any] = attrs.field(factory=dict)
    """As it was sent."""


@attrs.frozen(kw_only=True)
class ModelAnswer:
    """One answer of the policy."""

    content: str
    reasoning: str | None = None
    calls: Sequence[MessageCall] = ()
    finish: str = "stop"
    """`stop`, `length` or `tool_calls`."""
    stopped_by: str | None = None
    """The string among `stop` that ended it."""
    prompt_tokens: int
    tokens: int
    """That the policy produced."""
    log_probs: Sequence[tuple[str, float]] = ()
    """Of each of its tokens: text, nats."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a later call."""
        return assistant(self.content, self.reasoning, self.calls)


class Dialect(ABC):
    """One API.

    Attributes:
        path: that it is asked at.
        prefix: of the ids of its answers.
    """

    path: ClassVar[str]
    prefix: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return what a request asks.

        Raises:
            ApiError: it is wrong, or asks for what is not served.
        """

    @abstractmethod
    def write(self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        """Return the body of a response.

        Args:
            call: that is answered.
            name: id of the response.
            answers: as many as the call asked for.
        """

    @abstractmethod
    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        """Yield the events of a streamed response: type, where the API names it, and data."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error's response."""


def new_id(prefix: str) -> str:
    """Return an id that nothing else has."""
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def assistant(
    content: str, reasoning: str | None, calls: Sequence[MessageCall] = ()
) -> dict[str, Any]:
    """Return an assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def message_call(call_id: object, name: object, arguments: object, where: str) -> MessageCall:
    """Return a tool call of a message; arguments that are the text of a JSON object are read."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", name, "the name of a function")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {
        "id": str(call_id or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def arguments_text(call: MessageCall) -> str:
    """Return the arguments of a call as JSON."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def function_tool(tool: Mapping[str, Any], parameters: str, where: str) -> dict[str, Any]:
    """Return the schema of a function for the chat template.

    Args:
        tool: with `name`, `description` and its parameters.
        parameters: the key of these.
        where: the tool stands.
    """
    if not isinstance(tool.get("name"), str):
        raise invalid(f"{where}.name", tool.get("name"), "the name of a function")
    function = {"name": tool["name"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get(parameters) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def field(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
    """Return a field; None where it is absent or null.

    Raises:
        ApiError: it is of another type. A boolean is no number.
    """
    value = body.get(name)
    as_number = isinstance(value, bool) and kinds is not bool
    if value is not None and (not isinstance(value, kinds) or as_number):
        raise invalid(name, value, expected)
    return value


def count(body: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is a number of 1 or more; None where it is absent.

    Raises:
        ApiError: it is none.
    """
    value = field(body, name, int, "an integer of 1 or more")
    if value is not None and value < 1:
        raise invalid(name, value, "an integer of 1 or more")
    return None if value is None else int(value)


def objects(value: object, where: str, *, least: int = 0) -> list[Mapping[str, Any]]:
    """Return a list of JSON objects.

    Raises:
        ApiError: it is none, or shorter.
    """
    expected = f"a list of {'one or more ' * bool(least)}objects"
    if value is None and not least:
        return []
    if not isinstance(value, list) or len(value) < least:
        raise invalid(where, value, expected)
    for number, part in enumerate(value):
        if not isinstance(part, Mapping):
            raise invalid(f"{where}[{number}]", part, "an object")
    return value


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return strings that end an answer.

    Raises:
        ApiError: the field is no text and no list of texts.
    """
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise invalid(name, value, "a text, or a list of texts, none empty")
    return tuple(found)


def text_of(content: object, where: str) -> str:
    """Return the text of a message's content, of which the parts are joined.

    Raises:
        ApiError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(objects(content, where)):
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            kind = part.get("type")
            raise invalid(f"{where}[{number}].type", kind, "a part of text; others are not served")
        texts.append(text)
    return "".join(texts)


def asked_in_vain(body: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these fields a request gives."""
    return tuple(name for name in names if body.get(name) is not None)


def model_of(body: Mapping[str, Any]) -> str:
    """Return the model that a request names.

    Raises:
        ApiError: it names none.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("model", model, "the name of a model")
    return model


def check_ends(messages: Sequence[Message]) -> None:
    """Refuse messages of which the last is an assistant's.

    Raises:
        ApiError: it is.
    """
    if not messages or messages[-1]["role"] == "assistant":
        last = messages[-1]["content"] if messages else None
        raise invalid("messages", last, "a message of a user or a tool at the end")
