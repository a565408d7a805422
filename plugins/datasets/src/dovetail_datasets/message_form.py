"""MessageForm: the form in which a chat template takes messages, found by rendering short conversations."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from string import ascii_uppercase
from typing import Any, Literal

from dovetail.errors import DataError
from dovetail.interfaces import Message, Tokenizer

SENTINEL = "SENTINEL" + "".join(secrets.choice(ascii_uppercase) for _ in range(16))
"""The text that is rendered in trials: letters, which templates don't trim or escape, and random, so that no other text contains them."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of an assistant's message that hold its reasoning: in Qwen3 and DeepSeek, in gpt-oss, and in vLLM."""
_ARGUMENTS = {"value": SENTINEL}
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_CALL = {
    "id": "call00000",
    "type": "function",
}  # Mistral's templates require an id of nine letters and digits


ContentForm = Literal["text", "parts"]
"""The form in which a template reads a message's content."""
Tools = Sequence[Mapping[str, Any]] | None
"""Functions that the chat template describes in a conversation."""


def message_form(tokenizer: Tokenizer, tools: Tools = None) -> MessageForm:
    """Return the message form of the tokenizer's chat template; some tokenizers have another template for messages with tools.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: the functions of the conversation, if any.
    """
    return _form(tokenizer, tokenizer.get_chat_template(tools=tools or None), bool(tools))


class MessageForm:
    """The form in which a chat template reads messages: content as text or as parts, arguments of tool calls as a mapping or as JSON
    text, and the field that holds the reasoning.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: the functions that the template gets when its form is determined by rendering test messages.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Tools) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self._contents: dict[str, ContentForm | None] = {}

    def taken(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in the form that the template reads.

        Texts become lists of text parts, or the reverse, if the template reads only one of these forms. Likewise, call arguments become
        mappings or JSON text. Reasoning in a field that the template does not read moves to a field that it reads.

        Raises:
            DataError: the arguments of a call are not a JSON object, and the template accepts nothing else.
        """
        return [self._taken(message) for message in messages]

    def _taken(self, message: Message) -> dict[str, Any]:
        made, role, content = dict(message), str(message.get("role")), message.get("content")
        if len(made) == 2 and isinstance(content, str):  # the common case, first for speed
            made["content"] = self._written(role, content)
            return made
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in calls]
            made["content"] = made.get("content") or self._calls[1]
        else:
            # Some templates (DeepSeek) leave out the content if this key exists, even if its value is empty.
            made.pop("tool_calls", None)
        for field in THOUGHTS:
            if made.get(field) and self.thought_fields and field not in self.thought_fields:
                made[self.thought_fields[0]] = made.pop(field)
        content = made.get("content")
        if isinstance(content, str):
            made["content"] = self._written(role, content)
        elif content and all(map(_is_text, content)) and self._content(role) == "text":
            made["content"] = "".join(part["text"] for part in content)
        return made

    def _written(self, role: str, text: str | None) -> Any:
        """Return a text in the form that the template reads for the role; None for None."""
        return _parts(text) if text is not None and self._content(role) == "parts" else text

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            if not self._calls[0]:
                arguments = self._by_name(arguments, function.get("name"))
        elif self._calls[0]:
            arguments = json.dumps(arguments, ensure_ascii=False)
        if "function" in call:
            return {**call, "function": {**function, "arguments": arguments}}
        return {**call, "arguments": arguments}

    def _by_name(self, text: str, name: object) -> Any:
        """Parse a call's arguments as a JSON object. A text that is not one is returned unchanged if the template writes texts as they are.

        Args:
            text: the arguments as text.
            name: the name of the called function, for the error.

        Raises:
            DataError: the text is not a JSON object, and the template does not write texts as they are.
        """
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if self._writes_text:
            return text
        raise DataError(
            f"the arguments in a call of the function {name!r} are {text[:80]!r}; expected a JSON object",
            hint='write the arguments as an object such as {"city": "Rome"}, or as the JSON text of one',
        )

    def _content(self, role: str) -> ContentForm | None:
        """Return the only form in which the template reads a role's content; None if it reads both or neither."""
        if role not in self._contents:
            text, parts = (self._trial(role, write) for write in (str, _parts))
            reads_text = SENTINEL in text
            # A template for text only may write a list of parts as a Python or JSON literal; its keys, such as "type", give this away.
            reads_parts = SENTINEL in parts and parts.count("type") <= text.count("type")
            only: ContentForm = "text" if reads_text else "parts"
            self._contents[role] = None if reads_text == reads_parts else only
        return self._contents[role]

    def _trial(self, role: str, write: Callable[[str], Any]) -> str:
        question = {"role": "user", "content": write(".")}
        turn = {"role": role, "content": write(SENTINEL)}
        if role in ("user", "assistant"):
            return self.rendered([question, turn][role == "user" :])
        if role != "tool":
            return self.rendered([turn, question])
        arguments = '{"value": 0}' if self._calls[0] else {"value": 0}
        result = {**turn, "name": "tool", "tool_call_id": _CALL["id"]}
        return self.rendered([question, self._called(arguments, self._calls[1]), result])

    @cached_property
    def _calls(self) -> tuple[bool, str | None]:
        """Whether call arguments must be JSON text instead of a mapping; and the content that a turn of only calls must have, `""` or None.

        DeepSeek's templates take JSON text. The template of its R1 distillates writes calls only if the content is None.
        """
        for content in ("", None):
            for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
                text = self.rendered([self._question, self._called(arguments, content)])
                # Reject a mapping rendered as a Python literal, and a JSON text that was encoded as JSON again: models write neither.
                as_text = isinstance(arguments, str)
                if SENTINEL in text and (str(arguments) in text) is as_text:
                    return as_text, content
        return False, ""

    @cached_property
    def _writes_text(self) -> bool:
        """Whether the template writes a call's arguments unchanged if they are a text."""
        text = json.dumps(_ARGUMENTS)
        return text in self.rendered([self._question, self._called(text, self._calls[1])])

    @property
    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": self._written("user", ".")}

    def _called(self, arguments: object, content: str | None) -> dict[str, Any]:
        call = {**_CALL, "function": {"name": "tool", "arguments": arguments}}
        content = self._written("assistant", content)
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    @cached_property
    def thought_fields(self) -> tuple[str, ...]:
        """The fields of an assistant's message that the template renders as its reasoning."""
        turn = {"role": "assistant", "content": self._written("assistant", ".")}
        return tuple(
            field
            for field in THOUGHTS
            if SENTINEL in self.rendered([self._question, {**turn, field: SENTINEL}])
        )

    @cached_property
    def tail(self) -> str | None:
        """The text that the template writes after the assistant's text at the end of a conversation; None if unknown."""
        turn = {"role": "assistant", "content": SENTINEL}
        _, found, tail = self.rendered(self.taken([self._question, turn])).rpartition(SENTINEL)
        return tail if found else None

    def rendered(self, messages: Sequence[Message]) -> str:
        """Return the unchanged messages rendered as text; empty if the template raises."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=self._tools, tokenize=False
                )
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes; it does not take such messages
            return ""


@lru_cache(maxsize=8)
def _form(tokenizer: Tokenizer, _template: str, with_tools: bool) -> MessageForm:
    """Return the form of a tokenizer's template, cached by template, since the tokenizer's template may change."""
    return MessageForm(tokenizer, [_TOOL] if with_tools else None)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_text(part: object) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )
