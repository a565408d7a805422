"""OpenAI's responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.interfaces import Message, MessageCall
from dovetail_gateway.dialects.call import (
    Dialect,
    ModelAnswer,
    ModelCall,
    arguments_text,
    assistant,
    new_id,
    now,
)
from dovetail_gateway.dialects.chat_completions import SAMPLING, token_log_probs
from dovetail_gateway.dialects.reading import Fields, check_ends

Item = dict[str, Any]
_ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "temperature", "text", "tool_choice", "tools", "top_p")  # fmt: skip
"""Fields of a request that its response repeats."""
_LOG_PROBS = "message.output_text.logprobs"


class ResponsesApi(Dialect):
    """OpenAI's responses: `POST /v1/responses`."""

    path = "/v1/responses"
    prefix = "resp_"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        fields = Fields(body)
        for name in ("background", "conversation", "prompt"):
            if fields.get(name):
                raise fields.wrong(name, "no value: this endpoint does not support the field")
        given = body.get("input")
        if isinstance(given, str):
            fields = Fields({**body, "input": [{"role": "user", "content": given}]})
        messages = _Items(fields.each("input", least=1)).messages
        if instructions := fields.get("instructions", str, "a text"):
            messages.insert(0, {"role": "system", "content": instructions})
        for tool in fields.each("tools"):
            if tool.get("type") != "function":
                raise tool.wrong("type", "'function': other types are not supported")
        choice = fields.get("tool_choice")
        return ModelCall(
            model=fields.named("model", "the name of a model"),
            messages=check_ends(messages),
            tools=[tool.tool("parameters") for tool in fields.each("tools")],
            may_call=choice != "none",
            max_tokens=fields.count("max_output_tokens"),
            log_probs=_LOG_PROBS in fields.strings("include"),
            stream=fields.flag("stream"),
            unapplied=fields.unapplied(SAMPLING, fields.inner("text").inner("format"), choice),
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


def _begun(call: ModelCall, name: str) -> Item:
    body = call.body
    return {
        "id": name,
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": call.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **{field: body[field] for field in _ECHOED if body.get(field) is not None},
    }


def _output(call: ModelCall, answer: ModelAnswer, status: str) -> list[Item]:
    items: list[Item] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append(_item("rs_", "reasoning", summary=[], content=[thought]))
    if answer.content or not answer.calls:
        made = token_log_probs(answer) if call.log_probs else []
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": made}
        items.append(_item("msg_", "message", status, role="assistant", content=[text]))
    for one in answer.calls:
        what = {"name": one["function"]["name"], "arguments": arguments_text(one)}
        items.append(_item("fc_", "function_call", call_id=one["id"], **what))
    return items


def _item(prefix: str, kind: str, status: str = "completed", **fields: Any) -> Item:
    return {"id": new_id(prefix), "type": kind, "status": status, **fields}


def _item_events(index: int, item: Item) -> list[tuple[str, Item]]:
    """Return the events that stream the output's item at `index`, each as event type and data."""
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
    """Reads input items into messages: successive reasoning, text and calls are one turn of the assistant.

    Args:
        items: the input items, in order.
    """

    def __init__(self, items: Sequence[Fields]) -> None:
        self.messages: list[Message] = []
        self._text: str | None = None
        self._thought: str | None = None
        self._calls: list[MessageCall] = []
        for item in items:
            self._read(item)
        self._end_turn()

    def _read(self, item: Fields) -> None:
        kind, role = item.get("type") or "message", item.get("role")
        said = kind == "reasoning" or (kind, role) == ("message", "assistant")
        if kind != "function_call" and (not said or self._text is not None or self._calls):
            self._end_turn()
        if kind == "reasoning":
            self._thought = item.text("content") or item.text("summary") or None
        elif kind == "function_call":
            self._calls.append(item.call(item.get("call_id"), "arguments"))
        elif kind == "function_call_output":
            call_id = str(item.get("call_id") or "")
            self.messages.append(
                {"role": "tool", "content": item.text("output"), "tool_call_id": call_id}
            )
        elif kind != "message":
            raise item.wrong("type", "message, reasoning, function_call or function_call_output")
        elif role == "assistant":
            self._text = item.text("content")
        elif role in ("system", "developer", "user"):
            role = "user" if role == "user" else "system"
            self.messages.append({"role": role, "content": item.text("content")})
        else:
            raise item.wrong("role", "system, developer, user or assistant")

    def _end_turn(self) -> None:
        if self._text is not None or self._calls or self._thought:
            self.messages.append(assistant(self._text or "", self._thought, self._calls))
        self._text, self._thought, self._calls = None, None, []
