"""Parses and checks one row in verl's schema: the prompt as messages or text, the images, and the optional columns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import attrs
import numpy as np

from dovetail.config import format_path
from dovetail.errors import DataError, nearest
from dovetail.interfaces import GroundTruth
from dovetail.text import unencodable
from dovetail_datasets.images import RawImage, images_in, in_parts, shown, with_images
from dovetail_datasets.rows import is_nan, unfilled

_VIDEOS = "videos"
TOOLS = "tools"


@attrs.frozen(kw_only=True)
class RawRow:
    """The parts of a row, before its prompt is tokenised."""

    prompt: list[dict[str, Any]] | str
    data_source: str | None
    ground_truth: GroundTruth
    extra_info: Mapping[str, Any] | None
    response: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    """The functions that the chat template describes."""
    images: tuple[RawImage, ...] = ()
    """The images to which the prompt refers, in order."""
    folder: str | None = None
    """Folder of the file that holds the row; None for rows that are in no file."""

    @property
    def begun(self) -> bool:
        """Whether the prompt ends with a partial answer to continue."""
        return not isinstance(self.prompt, str) and self.prompt[-1]["role"] == "assistant"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages; a text becomes one user message, in which image parts replace image placeholders."""
        if not isinstance(self.prompt, str):
            return self.prompt
        content: Any = in_parts(self.prompt) if self.images else self.prompt
        return [{"role": "user", "content": content}]


def parse_row(
    row: Mapping[str, Any] | DataError,
    prompt_key: str,
    where: str,
    *,
    image_key: str = "images",
    folder: str | None = None,
) -> RawRow:
    """Check one row and return its parts. If `row` is the error of a failed read, raise it.

    Args:
        row: the row's values by column, or the error if it can't be read.
        prompt_key: the column of the prompt.
        where: the row's file and number, for messages.
        image_key: the column of the images.
        folder: the folder of the row's file; None for rows that are in no file.

    Raises:
        DataError: the row can't be read, or its prompt, its images or another column is invalid; the message names the row.
    """
    if isinstance(row, DataError):
        raise row
    check_row(row, where)
    reward_model = _mapping(row, "reward_model", where)
    data_source = row.get("data_source")
    if data_source is not None and not isinstance(data_source, str):
        raise wrong_value(where, "data_source", data_source, "a text")
    prompt, images = with_images(
        text_or_messages(row.get(prompt_key), prompt_key, where),
        images_in(row.get(image_key), image_key, where),
        where,
    )
    return RawRow(
        prompt=prompt,
        data_source=data_source or None,
        ground_truth=None if reward_model is None else reward_model.get("ground_truth"),
        extra_info=_mapping(row, "extra_info", where),
        response=response if isinstance(response := row.get("response"), str) else None,
        tools=tools_of(row.get(TOOLS), where),
        images=images,
        folder=folder,
    )


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row with videos, or with text that can't be tokenised and stored (lone surrogates).

    Raises:
        DataError: the row has videos or such text.
    """
    for path, text in unencodable(row):
        raise DataError(
            f"{where}: the text of {format_path(path)!r} contains half of a surrogate pair, which is not a valid character: {shown(text)}",
            hint="replace the half by the complete character, or remove the row",
        )
    if row.get(_VIDEOS) is not None and len(row[_VIDEOS]):
        raise DataError(
            f"{where}: the row has videos; expected only text and images",
            hint="remove rows with videos",
        )


def text_or_messages(value: object, key: str, where: str) -> list[dict[str, Any]] | str:
    """Check that the value of a column is a text or messages, and return it; messages in JSON text are parsed.

    Raises:
        DataError: the value is null, empty or of another type, or has a bad message; the error names the row.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(
                f"{where}: the column {key!r} is an empty text; expected a text or messages",
                hint="remove the row",
            )
        found = _messages_as_text(value, key, where)
        if found is None:
            return value
        value = found
    if isinstance(value, np.ndarray):  # pandas reads a list column as arrays
        value = unfilled(value)
    if not isinstance(value, (list, tuple)):
        raise wrong_value(
            where,
            key,
            value,
            "a text, or a list of messages such as {'role': 'user', 'content': '…'}",
        )
    if not value:
        raise DataError(
            f"{where}: the column {key!r} is an empty list; expected at least one message",
            hint="remove the row",
        )
    return [
        _message(message, f"{where}: message {i} of {key!r}") for i, message in enumerate(value)
    ]


def _messages_as_text(value: str, key: str, where: str) -> list[Any] | None:
    """Return the messages that a text contains as JSON; None for other texts."""
    if not re.match(r"\s*\[?\s*\{\s*['\"](role|content|from|value)['\"]\s*:", value):
        return None
    found = _from_json(value)
    if isinstance(found, list):
        return found
    raise DataError(
        f"{where}: the text in the column {key!r} looks like messages, but is not a JSON list: {shown(value)}",
        hint="write the messages as a list, or as the JSON text of a list (json.dumps in Python; str() does not write JSON)",
    )


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Role names of ShareGPT and Gemini → the standard roles. Templates would write the former unchanged, or as another role."""


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(
            f"{where} is {shown(message)}; expected a mapping with 'role' and 'content'",
            hint="write messages as {'role': 'user', 'content': '…'}",
        )
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if isinstance(content, np.ndarray) or isinstance(calls, np.ndarray):
        return _message(unfilled(message), where)
    if not isinstance(role, str) or not role:
        what = "no 'role'" if role is None else f"the role {shown(role)}"
        raise DataError(
            f"{where} has {what} (its keys: {', '.join(map(str, message)) or 'none'})",
            hint="set 'role' to a text such as 'system', 'user' or 'assistant'",
        )
    # Templates may know further roles, such as 'environment', but a role that resembles a standard role is a misspelling.
    meant = None
    if role not in _ROLES:
        meant = _OTHER_NAMES.get(role.casefold()) or nearest(role, _ROLES, cutoff=0.75)
    if meant is not None:
        raise DataError(
            f"{where} has the role {role!r}; expected a role such as 'system', 'user', 'assistant' or 'tool'",
            hint=f"did you mean {meant!r}?",
        )
    if not isinstance(content, (str, list)) and not calls:
        what = "no 'content'" if content is None else f"the content {shown(content)}"
        raise DataError(
            f"{where} has {what}; expected a text or a list of parts",
            hint="correct the row, or remove it",
        )
    # Parquet adds keys of other messages and parts with null values, and templates test whether a key exists.
    found = _without_nulls(message)
    if calls:
        found["tool_calls"] = _calls(calls, where)
    if isinstance(content, list):
        found["content"] = [_part(part, f"{where}: part {i}") for i, part in enumerate(content)]
    return found


def _part(part: object, where: str) -> dict[str, Any]:
    """Check a part of a message's content, and return it without null values.

    Every type is accepted, since a template may know types that this package does not.
    """
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    if not isinstance(part, Mapping) or (is_text and not isinstance(part.get("text"), str)):
        raise DataError(
            f"{where} is {shown(part)}; expected a mapping with 'type', and also with 'text' if the type is 'text'",
            hint="write the part as {'type': 'text', 'text': '…'}, or the whole content as a text",
        )
    return _without_nulls(part)


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in mapping.items() if part is not None}


def _calls(value: object, where: str) -> list[Any]:
    """Return the calls of a message, given as a list or as its JSON text."""
    calls = _from_json(value)
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise DataError(
            f"{where} has the tool_calls {shown(value)}; expected a list of calls, each with the name of a function",
            hint='write calls as [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]',
        )
    return calls


def _is_call(call: object) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), (str, Mapping, type(None)))
    )


def tools_of(value: object, where: str) -> list[dict[str, Any]] | None:
    """Return the functions of a row as JSON schemas, from a list or from the list's JSON text.

    Raises:
        DataError: the value is neither a list of mappings nor the JSON text of one.
    """
    if value is None or is_nan(value):
        return None
    tools = unfilled(value) if isinstance(value, np.ndarray) else _from_json(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise wrong_value(
            where, TOOLS, value, "a list of JSON schemas, or the JSON text of such a list"
        )
    return cast("list[dict[str, Any]]", tools) or None


def _from_json(value: object) -> object:
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def check_column(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    columns: Sequence[str],
    where: str,
    *,
    hint: str | None = None,
) -> None:
    """Refuse rows of which none has the column `key`.

    Args:
        rows: the rows.
        key: the name of the required column.
        columns: the names of the columns present, for the error.
        where: the file, for the error.
        hint: the hint of the error; by default to set `data.prompt_key`.

    Raises:
        DataError: no row has the column; the message names the columns present, and the nearest.
    """
    if any(key in row for row in rows):
        return
    close = nearest(key, columns)
    raise DataError(
        f"{where} has no column {key!r}; its columns: {', '.join(columns) or 'none'}",
        hint=hint or f"set data.prompt_key={close}"
        if hint or close
        else "set data.prompt_key to the column that holds the prompt",
    )


def _mapping(row: Mapping[str, Any], column: str, where: str) -> Mapping[str, Any] | None:
    value = row.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise wrong_value(where, column, value, "a mapping")
    return value


def wrong_value(where: str, column: str, value: object, wanted: str) -> DataError:
    """Return the error about a column's value of a wrong type; `wanted` describes the expected value."""
    what = "null or missing" if value is None else shown(value)
    return DataError(
        f"{where}: the column {column!r} is {what}; expected {wanted}",
        hint="correct the row, or remove it",
    )
