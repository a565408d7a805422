"""Anthropic's messages API."""

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
    assistant,
)
from dovetail_gateway.dialects.reading import Fields, check_ends

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_THINKS = ("enabled", "adaptive")
Block = dict[str, Any]


class MessagesApi(Dialect):
    """Anthropic's messages: `POST /v1/messages`."""

    path = "/v1/messages"
    prefix = "msg_"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        fields = Fields(body)
        system = fields.text("system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for given in fields.each("messages", least=1):
            messages += _read_message(given)
        for tool in fields.each("tools"):
            if tool.get("type") not in ("custom", None):
                raise tool.wrong("type", "'custom': other types are not supported")
        if (limit := fields.count("max_tokens")) is None:
            raise fields.wrong("max_tokens", "an integer of 1 or more")
        choice = fields.inner("tool_choice").get("type")
        return ModelCall(
            model=fields.named("model", "the name of a model"),
            messages=check_ends(messages),
            tools=[tool.tool("input_schema") for tool in fields.each("tools")],
            may_call=choice != "none",
            max_tokens=limit,
            stop=fields.strings("stop_sequences"),
            stream=fields.flag("stream"),
            unapplied=fields.unapplied(("temperature", "top_p", "top_k"), Fields({}), choice),
            body=body,
        )

    def write(self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]) -> Block:
        (answer,) = answers
        ends = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        ended = answer.stopped_by is not None and not answer.calls
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": _blocks(call, answer),
            "stop_reason": "stop_sequence" if ended else ends[answer.finish],
            "stop_sequence": answer.stopped_by if ended else None,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "output_tokens": answer.tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, Block | str]]:
        whole = self.write(call, name, answers)
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**whole["usage"], "output_tokens": 0}
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, error: ApiError) -> Block:
        kind = _TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _event(kind: str, **data: Any) -> tuple[str, Block]:
    return kind, {"type": kind, **data}


def _streamed(block: Block) -> tuple[Block, list[Block]]:
    """Return the start of a streamed block, and the deltas that complete it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return {**block, "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
    text = arguments_text({"function": {"arguments": block["input"]}})
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _blocks(asked: ModelCall, answer: ModelAnswer) -> list[Block]:
    """Return the content blocks of an answer. Reasoning is included only on request, since programs read the first block as text."""
    thinking = asked.body.get("thinking")
    blocks: list[Block] = []
    if answer.reasoning and isinstance(thinking, Mapping) and thinking.get("type") in _THINKS:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "dovetail"})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        name, given = call["function"]["name"], call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _read_message(given: Fields) -> list[Message]:
    """Return a request's message as one or more messages: each result of a tool becomes its own message."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise given.wrong("role", "user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, thoughts, calls = [], [], []
    results: list[Message] = []
    for block in given.each("content"):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(block.call(block.get("id"), "input"))
            case "tool_result":
                call_id = str(block.get("tool_use_id") or "")
                results.append(
                    {"role": "tool", "content": block.text("content"), "tool_call_id": call_id}
                )
            case _:
                texts.append(block.part())
    if role == "assistant":
        return [assistant("".join(texts), "".join(thoughts) or None, calls)]
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts else [])]
