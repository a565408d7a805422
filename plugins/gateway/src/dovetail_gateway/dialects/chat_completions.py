"""OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.interfaces import Message
from dovetail_gateway.dialects.call import (
    Dialect,
    ModelAnswer,
    ModelCall,
    arguments_text,
    assistant,
    now,
)
from dovetail_gateway.dialects.reading import Fields, check_ends

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")  # fmt: skip
"""The sampling fields of a request; they have no effect, since the run's config decides sampling."""
_MOST_ANSWERS = 128


class ChatCompletionsApi(Dialect):
    """OpenAI's chat completions: `POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    prefix = "chatcmpl-"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        fields = Fields(body)
        messages = [_message(given) for given in fields.each("messages", least=1)]
        if fields.get("top_logprobs"):
            raise fields.wrong(
                "top_logprobs", "0: only log-probabilities of drawn tokens are available"
            )
        choice = fields.get("tool_choice")
        return ModelCall(
            model=fields.named("model", "the name of a model"),
            messages=check_ends(messages),
            tools=[_tool(tool) for tool in fields.each("tools")],
            may_call=choice != "none",
            max_tokens=fields.count("max_completion_tokens") or fields.count("max_tokens"),
            stop=fields.strings("stop"),
            n=fields.count("n", most=_MOST_ANSWERS) or 1,
            log_probs=fields.flag("logprobs"),
            stream=fields.flag("stream"),
            unapplied=fields.unapplied(SAMPLING, fields.inner("response_format"), choice),
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
                    **({"tool_calls": _calls(answer)} if answer.calls else {}),
                },
                "logprobs": _log_probs(call, answer),
            }
            for number, answer in enumerate(answers)
        ]
        begun = _begun(call, name, "chat.completion")
        return {**begun, "choices": choices, "usage": _usage(answers)}

    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        chunk = _begun(call, name, "chat.completion.chunk")
        for number, answer in enumerate(answers):
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            deltas += [_thought(answer)] if answer.reasoning else []
            deltas.append({"content": answer.content})
            deltas += [{"tool_calls": [{"index": i, **c}]} for i, c in enumerate(_calls(answer))]
            for delta in (*deltas, {}):
                choice = {
                    "index": number,
                    "delta": delta,
                    "finish_reason": None if delta else answer.finish,
                    "logprobs": _log_probs(call, answer) if delta.keys() == {"content"} else None,
                }
                yield None, {**chunk, "choices": [choice]}
        options = call.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield None, {**chunk, "choices": [], "usage": _usage(answers)}
        yield None, "[DONE]"


def _begun(call: ModelCall, name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": now(), "model": call.model}


def _message(given: Fields) -> Message:
    role, content = given.get("role"), given.text("content")
    match role:
        case "system" | "developer":
            return {"role": "system", "content": content}
        case "user":
            return {"role": "user", "content": content}
        case "tool":
            call_id = str(given.get("tool_call_id") or "")
            return {"role": "tool", "content": content, "tool_call_id": call_id}
        case "assistant":
            calls = [
                call.inner("function").call(call.get("id"), "arguments")
                for call in given.each("tool_calls")
            ]
            thought = given.get("reasoning_content") or given.get("reasoning")
            return assistant(content, thought if isinstance(thought, str) else None, calls)
    raise given.wrong("role", "system, developer, user, assistant or tool")


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise tool.wrong("type", "'function': other types are not supported")
    return tool.inner("function").tool("parameters")


def _thought(answer: ModelAnswer) -> dict[str, Any]:
    """Return the reasoning under both field names that servers of open models use."""
    thought = answer.reasoning
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def _calls(answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return an answer's tool calls, with their arguments as JSON text."""
    texts = [{**c["function"], "arguments": arguments_text(c)} for c in answer.calls]
    return [{**c, "function": text} for c, text in zip(answer.calls, texts, strict=True)]


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
