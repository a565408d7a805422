"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.interfaces import Message
from dovetail_gateway.dialects.call import (
    ApiError,
    Dialect,
    ModelAnswer,
    ModelCall,
    arguments_text,
    asked_in_vain,
    assistant,
    check_ends,
    count,
    field,
    function_tool,
    invalid,
    message_call,
    model_of,
    now,
    objects,
    stop_strings,
    text_of,
)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")  # fmt: skip
"""Fields of how tokens are drawn: that is the run's affair."""
_MOST_ANSWERS = 128
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}  # fmt: skip


class ChatCompletionsApi(Dialect):
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    prefix = "chatcmpl-"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        given = objects(body.get("messages"), "messages", least=1)
        messages = [_message(m, f"messages[{i}]") for i, m in enumerate(given)]
        check_ends(messages)
        n = count(body, "n") or 1
        if n > _MOST_ANSWERS:
            raise invalid("n", n, f"{_MOST_ANSWERS} at most")
        if body.get("top_logprobs"):
            raise invalid("top_logprobs", body["top_logprobs"], "0: those of drawn tokens are kept")
        choice = body.get("tool_choice")
        return ModelCall(
            model=model_of(body),
            messages=messages,
            tools=[
                _tool(t, f"tools[{i}]") for i, t in enumerate(objects(body.get("tools"), "tools"))
            ],
            may_call=choice != "none",
            max_tokens=count(body, "max_completion_tokens") or count(body, "max_tokens"),
            stop=stop_strings(body, "stop"),
            n=n,
            log_probs=bool(field(body, "logprobs", bool, "true or false")),
            stream=bool(field(body, "stream", bool, "true or false")),
            unapplied=unapplied(body, body.get("response_format"), choice),
            body=body,
        )

    def write(self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "finish_reason": answer.finish,
                "message": {
                    "role": "assistant",
                    "content": answer.content or (None if answer.calls else ""),
                    "refusal": None,
                    **_thought(answer),
                    **_calls(answer),
                },
                "logprobs": _log_probs(call, answer),
            }
            for number, answer in enumerate(answers)
        ]
        return {
            "id": name,
            "object": "chat.completion",
            "created": now(),
            "model": call.model,
            "choices": choices,
            "usage": _usage(answers),
        }

    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        chunk = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": now(),
            "model": call.model,
        }
        for number, answer in enumerate(answers):
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            if answer.reasoning:
                deltas.append(_thought(answer))
            deltas.append({"content": answer.content})
            deltas += [
                {"tool_calls": [{"index": i, **made}]}
                for i, made in enumerate(_calls(answer).get("tool_calls", ()))
            ]
            for delta in deltas:
                log_probs = (
                    _log_probs(call, answer) if "content" in delta and "role" not in delta else None
                )
                choice = {
                    "index": number,
                    "delta": delta,
                    "finish_reason": None,
                    "logprobs": log_probs,
                }
                yield None, {**chunk, "choices": [choice]}
            last = {"index": number, "delta": {}, "finish_reason": answer.finish, "logprobs": None}
            yield None, {**chunk, "choices": [last]}
        options = call.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield None, {**chunk, "choices": [], "usage": _usage(answers)}
        yield None, "[DONE]"

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }


def unapplied(body: Mapping[str, Any], form: object, choice: object) -> tuple[str, ...]:
    """Return what a request asks for and does not get.

    Args:
        body: of the request.
        form: in which the answer is to be.
        choice: of a tool.
    """
    found = asked_in_vain(body, SAMPLING)
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        found += ("response_format",)
    return found if choice in (None, "auto", "none") else (*found, "tool_choice")


def _message(given: Mapping[str, Any], where: str) -> Message:
    role, content = given.get("role"), text_of(given.get("content"), f"{where}.content")
    match role:
        case "system" | "developer":
            return {"role": "system", "content": content}
        case "user":
            return {"role": "user", "content": content}
        case "tool":
            return {
                "role": "tool",
                "content": content,
                "tool_call_id": str(given.get("tool_call_id") or ""),
            }
        case "assistant":
            calls = []
            for i, call in enumerate(objects(given.get("tool_calls"), f"{where}.tool_calls")):
                (function,) = objects([call.get("function")], f"{where}.tool_calls[{i}].function")
                calls.append(
                    message_call(
                        call.get("id"),
                        function.get("name"),
                        function.get("arguments"),
                        f"{where}.tool_calls[{i}].function",
                    )
                )
            thought = given.get("reasoning_content") or given.get("reasoning")
            return assistant(content, thought if isinstance(thought, str) else None, calls)
    raise invalid(f"{where}.role", role, "system, developer, user, assistant or tool")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise invalid(f"{where}.type", tool.get("type"), "function; others are not served")
    return function_tool(tool["function"], "parameters", f"{where}.function")


def _thought(answer: ModelAnswer) -> dict[str, Any]:
    """The reasoning under both names that servers of open models give it."""
    thought = answer.reasoning
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def _calls(answer: ModelAnswer) -> dict[str, Any]:
    if not answer.calls:
        return {}
    return {
        "tool_calls": [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
            }
            for call in answer.calls
        ]
    }


def _log_probs(call: ModelCall, answer: ModelAnswer) -> dict[str, Any] | None:
    return {"content": token_log_probs(answer), "refusal": None} if call.log_probs else None


def token_log_probs(answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the log-probabilities (nats) of an answer's tokens in OpenAI's form."""
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in answer.log_probs
    ]


def _usage(answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    prompt, made = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
