"""Anthropic's messages."""

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
    objects,
    stop_strings,
    text_of,
)

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_THINKS = ("enabled", "adaptive")
Block = dict[str, Any]


class MessagesApi(Dialect):
    """`POST /v1/messages`."""

    path = "/v1/messages"
    prefix = "msg_"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        system = text_of(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for number, given in enumerate(objects(body.get("messages"), "messages", least=1)):
            messages += _read_message(given, f"messages[{number}]")
        check_ends(messages)
        tools = []
        for number, tool in enumerate(objects(body.get("tools"), "tools")):
            where = f"tools[{number}]"
            if tool.get("type", "custom") not in ("custom", None):
                raise invalid(f"{where}.type", tool["type"], "custom; others are not served")
            tools.append(function_tool(tool, "input_schema", where))
        limit = count(body, "max_tokens")
        if limit is None:
            raise invalid("max_tokens", None, "an integer of 1 or more")
        chosen = field(body, "tool_choice", Mapping, "an object") or {}
        forced = ("tool_choice",) if chosen.get("type", "auto") not in ("auto", "none") else ()
        return ModelCall(
            model=model_of(body),
            messages=messages,
            tools=tools,
            may_call=chosen.get("type") != "none",
            max_tokens=limit,
            stop=stop_strings(body, "stop_sequences"),
            stream=bool(field(body, "stream", bool, "true or false")),
            unapplied=asked_in_vain(body, ("temperature", "top_p", "top_k")) + forced,
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
    """A block as it begins, and what is added to it."""
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


def _blocks(call: ModelCall, answer: ModelAnswer) -> list[Block]:
    """The content of an answer; reasoning where the request asks for it, since programs read the first block as text."""
    thinking = call.body.get("thinking")
    blocks: list[Block] = []
    if answer.reasoning and isinstance(thinking, Mapping) and thinking.get("type") in _THINKS:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "dovetail"})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    blocks += [
        {
            "type": "tool_use",
            "id": made["id"],
            "name": made["function"]["name"],
            "input": made["function"]["arguments"],
        }
        for made in answer.calls
    ]
    return blocks


def _read_message(given: Mapping[str, Any], where: str) -> list[Message]:
    """The messages that one stands for: results of tools are messages of their own."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", role, "user or assistant")
    if not isinstance(content, str):
        content = objects(content, f"{where}.content")
    if role != "assistant":
        return _of_user(role, content, f"{where}.content")
    if isinstance(content, str):
        return [assistant(content, None)]
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(
                    message_call(block.get("id"), block.get("name"), block.get("input"), place)
                )
            case _:
                texts.append(text_of([block], place))
    return [assistant("".join(texts), "".join(thoughts) or None, calls)]


def _of_user(role: str, content: Any, where: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    texts = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "content": text_of(block.get("content"), f"{place}.content"),
                    "tool_call_id": str(block.get("tool_use_id") or ""),
                }
            )
        else:
            texts.append(text_of([block], place))
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts else [])]
