"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.interfaces import Message, MessageCall
from dovetail_gateway.dialects.call import (
    ApiError,
    Dialect,
    ModelAnswer,
    ModelCall,
    arguments_text,
    assistant,
    check_ends,
    count,
    field,
    function_tool,
    invalid,
    message_call,
    model_of,
    new_id,
    now,
    objects,
    text_of,
)
from dovetail_gateway.dialects.chat_completions import openai_error, token_log_probs, unapplied

Item = dict[str, Any]
_LOG_PROBS = "message.output_text.logprobs"


class ResponsesApi(Dialect):
    """`POST /v1/responses`."""

    path = "/v1/responses"
    prefix = "resp_"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        for name in ("background", "conversation", "prompt"):
            if body.get(name):
                raise invalid(name, body[name], "nothing: it is not served")
        instructions = field(body, "instructions", str, "a text")
        given = body.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        messages = _Items(objects(given, "input", least=1)).messages
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        check_ends(messages)
        tools = []
        for number, tool in enumerate(objects(body.get("tools"), "tools")):
            where = f"tools[{number}]"
            if tool.get("type") != "function":
                raise invalid(f"{where}.type", tool.get("type"), "function; others are not served")
            tools.append(function_tool(tool, "parameters", where))
        text = field(body, "text", Mapping, "an object") or {}
        choice = body.get("tool_choice")
        return ModelCall(
            model=model_of(body),
            messages=messages,
            tools=tools,
            may_call=choice != "none",
            max_tokens=count(body, "max_output_tokens"),
            log_probs=_LOG_PROBS in (field(body, "include", list, "a list") or ()),
            stream=bool(field(body, "stream", bool, "true or false")),
            unapplied=unapplied(body, text.get("format"), choice),
            body=body,
        )

    def write(self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]) -> Item:
        (answer,) = answers
        cut = answer.finish == "length"
        status = "incomplete" if cut else "completed"
        return {
            **_begun(call, name),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(call, answer, status),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.tokens,
            },
        }

    def events(
        self, call: ModelCall, name: str, answers: Sequence[ModelAnswer]
    ) -> Iterator[tuple[str | None, Item | str]]:
        whole = self.write(call, name, answers)
        made = [
            ("response.created", {"response": _begun(call, name)}),
            ("response.in_progress", {"response": _begun(call, name)}),
        ]
        for index, item in enumerate(whole["output"]):
            made += _item_events(index, item)
        made.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, data) in enumerate(made):
            yield kind, {"type": kind, "sequence_number": number, **data}

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error)


def _begun(call: ModelCall, name: str) -> Item:
    body = call.body
    return {
        "id": name,
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": call.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _output(call: ModelCall, answer: ModelAnswer, status: str) -> list[Item]:
    items: list[Item] = []
    if answer.reasoning:
        items.append(
            {
                "id": new_id("rs_"),
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": answer.reasoning}],
                "status": "completed",
            }
        )
    if answer.content or not answer.calls:
        text = {
            "type": "output_text",
            "text": answer.content,
            "annotations": [],
            "logprobs": token_log_probs(answer) if call.log_probs else [],
        }
        items.append(
            {
                "id": new_id("msg_"),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    items += [
        {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": made["id"],
            "name": made["function"]["name"],
            "arguments": arguments_text(made),
            "status": "completed",
        }
        for made in answer.calls
    ]
    return items


def _item_events(index: int, item: Item) -> list[tuple[str, Item]]:
    """The events by which one item of the output arrives."""
    at = {"output_index": index, "item_id": item["id"]}
    part_at = {**at, "content_index": 0}
    if item["type"] == "function_call":
        begun = {**item, "arguments": "", "status": "in_progress"}
        text, name = item["arguments"], "response.function_call_arguments"
        inner = [
            (f"{name}.delta", {**at, "delta": text}),
            (f"{name}.done", {**at, "arguments": text, "name": item["name"]}),
        ]
    else:
        begun = {**item, "content": [], "status": "in_progress"}
        (part,) = item["content"]
        name = f"response.{part['type']}"
        extra = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        inner = [
            ("response.content_part.added", {**part_at, "part": {**part, "text": ""}}),
            (f"{name}.delta", {**part_at, "delta": part["text"], **extra}),
            (f"{name}.done", {**part_at, "text": part["text"], **extra}),
            ("response.content_part.done", {**part_at, "part": part}),
        ]
    return [
        ("response.output_item.added", {"output_index": index, "item": begun}),
        *inner,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]


class _Items:
    """Reads items of input into messages: reasoning, text and calls that follow one another are one turn of the assistant.

    Args:
        items: in order.
    """

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self.messages: list[Message] = []
        self._text: str | None = None
        self._thought: str | None = None
        self._calls: list[MessageCall] = []
        for number, item in enumerate(items):
            self._read(item, f"input[{number}]")
        self._end_turn()

    def _read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind == "reasoning":
            if self._text is not None or self._calls:
                self._end_turn()
            self._thought = text_of(item.get("content") or item.get("summary"), where) or None
        elif kind == "function_call":
            self._calls.append(
                message_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            )
        elif kind == "function_call_output":
            self._end_turn()
            content = text_of(item.get("output"), f"{where}.output")
            call_id = str(item.get("call_id") or "")
            self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "message":
            self._read_message(item, where)
        else:
            raise invalid(
                f"{where}.type", kind, "message, reasoning or function_call, or its output"
            )

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            if self._text is not None or self._calls:
                self._end_turn()
            self._text = content
            return
        self._end_turn()
        roles = {"system": "system", "developer": "system", "user": "user"}
        if role not in roles:
            raise invalid(f"{where}.role", role, "system, developer, user or assistant")
        self.messages.append({"role": roles[role], "content": content})

    def _end_turn(self) -> None:
        if self._text is not None or self._calls or self._thought:
            self.messages.append(assistant(self._text or "", self._thought, self._calls))
        self._text, self._thought, self._calls = None, None, []
