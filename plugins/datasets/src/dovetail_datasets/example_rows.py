"""Parses and checks one row of examples: a conversation, a preference pair or a rated response, in the formats of TRL and verl.

| kind | columns |
|---|---|
| conversations | `messages`; every assistant turn is trained on, or only the last (`data.trained_turns`) |
| conversations | `prompt`, and `response` or `completion` |
| preferences | `prompt`, `chosen`, `rejected` |
| preferences | `chosen`, `rejected`: two conversations, whose common beginning is the prompt |
| unpaired_preferences | `prompt`, `response` or `completion`, and `label`, true for a desirable response |

Preference pairs may have a `margin`: the difference between the ratings of the chosen and the rejected answer.

Prompts and responses are texts or messages. `data.prompt_key` names the prompt's column, and `data.messages_key` the column of
conversations. A turn with `weight: 0` is not trained on, as in OpenAI's format. The column `tools` holds the functions for the chat
template, as JSON schemas. Images are in the column `data.image_key` or in the messages, as in prompts (`images.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces import Examples, Prompt
from dovetail.sections import DataSection
from dovetail_datasets.images import RawImage, count_images, images_in, shown, with_images
from dovetail_datasets.rows import FileRows
from dovetail_datasets.schema import (
    TOOLS,
    check_column,
    check_row,
    text_or_messages,
    tools_of,
    wrong_value,
)

Turns = list[dict[str, Any]]
ASSISTANT = "assistant"
_RESPONSES, _SIDES = ("response", "completion"), ("chosen", "rejected")
_LABEL, _MARGIN = "label", "margin"
_TOOL = "tool"
"""The role of a tool's result."""
LABEL_COLUMNS = frozenset({"desirable", _MARGIN})
"""Columns of a batch that come from rows, besides their responses."""


@attrs.frozen(kw_only=True, eq=False)
class TrainedResponse:
    """The tokens that follow a prompt, with the mask of the trained tokens."""

    ids: np.ndarray
    """Token ids, int64 [T]; the last one is trained on."""
    mask: np.ndarray
    """The loss mask, bool [T]: True on the tokens that are trained on."""
    image_mask: np.ndarray | None = None
    """The mask of image placeholders, bool [T]; None without images."""


@attrs.frozen(kw_only=True, eq=False)
class Example(Prompt):
    """A tokenised row to train on. Its prompt is everything before the first trained token."""

    answers: tuple[TrainedResponse, ...]
    """The answers: one for a conversation; the chosen and the rejected one for a preference pair."""
    labels: Mapping[str, bool | float] = attrs.field(factory=dict)
    """The row's labels of the answers (`desirable`, `margin`), by column of the batch."""
    lost: int = 0
    """The number of tokens beyond a limit that were cut off."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The prompt's token ids, int64 [P]; then each answer's token ids, int64 [T], and loss mask, bool [T]."""
        return (
            self.prompt_ids,
            *(values for each in self.answers for values in (each.ids, each.mask)),
        )


@attrs.frozen(kw_only=True)
class RawExample:
    """The parts of a row before tokenisation. The prompt and the responses are either all messages or all texts."""

    prompt: Turns | str
    responses: tuple[Turns | str, ...]
    last_only: bool = False
    """Whether to train only on the last trained turn of each response."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the chat template describes."""
    labels: Mapping[str, bool | float] = attrs.field(factory=dict)
    """The row's labels of the responses (`desirable`, `margin`), by column of the batch."""
    images: tuple[RawImage, ...] = ()
    """Images of the messages up to the last turn that is trained on, in order."""
    folder: str | None = None
    """Folder of the file that holds the row; None if unknown."""

    def trained(self, response: Turns) -> list[int]:
        """Return the turns that are trained on, as indices into the prompt's and the response's messages together."""
        turns = enumerate(response, len(self.prompt))
        places = [i for i, turn in turns if _is_assistant(turn) and turn.get("weight") != 0]
        return places[-1:] if self.last_only else places


def row_parser(
    files: Sequence[FileRows], kind: Examples, section: DataSection
) -> Callable[[Mapping[str, Any], str, str | None], RawExample]:
    """Return a function that checks and parses one row.

    The function has three arguments: the row, the row's name in messages (its file and number), and the folder to which relative
    paths in the row refer.

    Args:
        files: the files, with the columns of all rows.
        kind: the kind of example.
        section: the data section, with the prompt's column and the handling of texts.

    Raises:
        DataError: a file lacks a column; the message names those that it has.
    """
    there = {column for file in files for column in file.columns}
    responses, needed = _columns(kind, there, section)
    for file in files:
        for column in needed:
            check_column(
                file.rows,
                column,
                file.columns,
                file.path,
                hint=_formats(kind, section, file.columns),
            )

    def parse(row: Mapping[str, Any], where: str, folder: str | None) -> RawExample:
        check_row(row, where)
        images = images_in(row.get(section.image_key), section.image_key, where)
        example = attrs.evolve(
            _with_images(_parts(row, responses, section, where), images, where),
            folder=folder,
            last_only=section.trained_turns == "last",
            tools=tools_of(row.get(TOOLS), where),
            labels=_labels(row, kind, margins=_MARGIN in there, where=where),
        )
        if example.tools and isinstance(example.prompt, str):
            raise DataError(
                f"{where}: the row has the column {TOOLS!r}, but its prompt and responses are texts, which do not go through the chat template",
                hint="write the row with messages, or remove the column",
            )
        for name, response in zip(
            responses or (section.messages_key,), example.responses, strict=True
        ):
            if not isinstance(response, str):
                _check_turns(example, response, name, where)
        if kind == "preferences":
            _check_pair(example, where)
        return _up_to_the_last_trained(example)

    return parse


def _with_images(example: RawExample, images: tuple[RawImage, ...], where: str) -> RawExample:
    """Return the example with its images; every image needs a part in the messages, or a placeholder in the text.

    Raises:
        DataError: an assistant's message or an answer of a pair has an image; and see `with_images`.
    """
    prompt, responses = example.prompt, [r for r in example.responses if not isinstance(r, str)]
    if isinstance(prompt, str) or not responses:
        text, images = with_images(prompt, images, where)
        return attrs.evolve(example, prompt=text, images=images)
    if len(responses) > 1 and any(map(count_images, responses)):
        raise DataError(
            f"{where}: 'chosen' or 'rejected' has an image after the prompt; expected images only in the prompt of a preference pair",
            hint="move the image into the prompt, or remove the row",
        )
    seen = prompt if len(responses) > 1 else [*prompt, *responses[0]]
    typed, images = with_images(seen, images, where)
    assert not isinstance(typed, str)
    if any(_is_assistant(message) and count_images([message]) for message in typed):
        raise DataError(
            f"{where}: a message of the role 'assistant' has an image; expected only text, since models generate no images",
            hint="move the image into a message of another role, or remove the row",
        )
    prompt, behind = typed[: len(prompt)], typed[len(prompt) :]
    if len(responses) == 1:
        responses = [behind]
    return attrs.evolve(example, prompt=prompt, responses=tuple(responses), images=images)


def _up_to_the_last_trained(example: RawExample) -> RawExample:
    """Return the example without the images of messages after the last trained turn, since these messages are left out."""
    (first, *others) = example.responses
    if not example.images or others or isinstance(first, str):
        return example
    turns = [*example.prompt, *first][: example.trained(first)[-1] + 1]
    return attrs.evolve(example, images=example.images[: count_images(turns)])


def _columns(
    kind: Examples, there: Collection[str], section: DataSection
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples of column names: the columns with the responses, and the columns that every file must have.

    The first tuple is empty if the responses are part of a conversation in one column.

    Args:
        kind: the kind of example.
        there: the columns that the files have, which decide between formats of the same kind.
        section: the data section, with the names of the prompt's and the conversations' column.
    """
    if kind == "preferences":
        return _SIDES, _SIDES
    responses = tuple(name for name in _RESPONSES if name in there)[:1]
    if kind == "unpaired_preferences":
        responses = responses or _RESPONSES[:1]
        return responses, (section.prompt_key, *responses, _LABEL)
    messages = section.messages_key
    if messages in there or not (responses or section.prompt_key in there):
        return (), (messages,)
    responses = responses or _RESPONSES[:1]
    return responses, (section.prompt_key, *responses)


def _formats(kind: Examples, section: DataSection, columns: Sequence[str]) -> str:
    prompt, messages = section.prompt_key, section.messages_key
    if kind == "conversations" and "conversations" in columns:
        return f"rename the column 'conversations' to {messages!r}, and in its messages 'from' to 'role' and 'value' to 'content'"
    if kind == "conversations":
        return f"write conversations in the column {messages!r} (data.messages_key), or in the columns {prompt!r} (data.prompt_key) and 'response'"
    if kind == "unpaired_preferences":
        return f"write rated responses in the columns {prompt!r} (data.prompt_key), 'response' (or 'completion') and 'label'"
    return f"write preference pairs in the columns {prompt!r} (data.prompt_key), 'chosen' and 'rejected'"


def _parts(
    row: Mapping[str, Any], names: Sequence[str], section: DataSection, where: str
) -> RawExample:
    if not names:
        turns = text_or_messages(row.get(section.messages_key), section.messages_key, where)
        if isinstance(turns, str):
            raise wrong_value(where, section.messages_key, turns, "a list of messages")
        return RawExample(prompt=[], responses=(turns,))
    responses = [text_or_messages(row.get(name), name, where) for name in names]
    prompt = row.get(section.prompt_key)
    if names == _SIDES and _is_implicit(prompt, responses):
        return _divided(responses, where)
    prompt = text_or_messages(prompt, section.prompt_key, where)
    texts = isinstance(prompt, str) and all(isinstance(response, str) for response in responses)
    if texts and section.plain_prompts == "raw":
        return RawExample(prompt=prompt, responses=tuple(responses))
    before, answers = _turns(prompt, "user"), [_turns(r, ASSISTANT) for r in responses]
    for name, answer in zip(names, answers, strict=True):
        if _is_assistant(before[-1]) and _is_assistant(answer[0]):
            raise DataError(
                f"{where}: {section.prompt_key!r} ends with a message of the role 'assistant', and {name!r} begins with another one; expected only one of them",
                hint=f"join the two messages into one in {name!r}, all of which is trained on, or remove the row",
            )
    return RawExample(prompt=before, responses=tuple(answers))


def _labels(
    row: Mapping[str, Any], kind: Examples, *, margins: bool, where: str
) -> dict[str, bool | float]:
    """Return a row's labels of its responses, by column of the batch."""
    if kind == "unpaired_preferences":
        if not isinstance(label := row.get(_LABEL), bool):
            raise wrong_value(where, _LABEL, label, "true or false")
        return {"desirable": label}
    if kind != "preferences" or not margins:
        return {}
    margin: Any = row.get(_MARGIN)
    if type(margin) not in (int, float) or not math.isfinite(margin := float(margin)):
        raise wrong_value(where, _MARGIN, margin, "a finite number")
    return {"margin": margin}


def _turns(value: Turns | str, role: str) -> Turns:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _is_implicit(prompt: object, sides: Sequence[Turns | str]) -> bool:
    """Return whether a preference pair's prompt has to be taken from its responses (`sides`), as the messages with which both begin.

    That is so if the row has no prompt, or if its prompt is a text and both responses are conversations that do not begin with the
    assistant: some datasets repeat the prompt as text, which is ignored.
    """
    whole = (isinstance(side, list) and not _is_assistant(side[0]) for side in sides)
    return prompt is None or (isinstance(prompt, str) and all(whole))


def _divided(sides: Sequence[Turns | str], where: str) -> RawExample:
    """Return a preference pair: its prompt is the messages with which both conversations (`sides`) begin, its responses are the rest."""
    chosen, rejected = sides
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"{where}: the row has no prompt, and none can be derived from 'chosen' and 'rejected', which are not both lists of "
            "messages",
            hint="add a column with the prompt, and set data.prompt_key to its name",
        )
    if chosen == rejected:
        raise _equal(where)
    same = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )
    both = dict(zip(_SIDES, (chosen, rejected), strict=True))
    for name, side in both.items():
        if same == len(side):
            raise DataError(
                f"{where}: {name!r} has no answer: all its messages are also the first messages of the pair's other conversation",
                hint="correct the row, or remove it",
            )
    if not same or not all(_is_assistant(side[same]) for side in (chosen, rejected)):
        raise DataError(
            f"{where}: the prompts of 'chosen' and 'rejected' differ: message {same} is {shown(chosen[same])} in 'chosen' and "
            f"{shown(rejected[same])} in 'rejected'",
            hint="write two answers to the same prompt, or remove the row",
        )
    return RawExample(prompt=chosen[:same], responses=(chosen[same:], rejected[same:]))


def _check_turns(example: RawExample, response: Turns, name: str, where: str) -> None:
    """Check a response's turns: weights, a turn to train on, a message before that turn, and the order of tool results."""
    for place, turn in enumerate(response):
        if turn.get("weight", 1) not in (0, 1):
            raise DataError(
                f"{where}: message {place} of {name!r} has the weight {turn['weight']!r}; expected 1, or 0 for a turn that is not "
                "trained on",
                hint="write 0 or 1, or leave the weight out",
            )
    places = [place - len(example.prompt) for place in example.trained(response)]
    if not places:
        roles = ", ".join(repr(turn["role"]) for turn in response)
        raise DataError(
            f"{where}: {name!r} has no turn to train on: none of its messages has the role 'assistant' and a weight other than 0 "
            f"(its roles: {roles})",
            hint="write the answer with the role 'assistant' and without a weight, or remove the row",
        )
    if not example.prompt and not places[0]:
        raise DataError(
            f"{where}: {name!r} begins with a message of the role 'assistant'; expected a message of another role before it",
            hint="correct the row, or remove it",
        )
    before = [*example.prompt, *response]
    for place, turn in enumerate(response, len(example.prompt)):
        # The assistant's message need not have `tool_calls`, since its text may contain the call.
        if turn["role"] == _TOOL and (
            not place or before[place - 1]["role"] not in (_TOOL, ASSISTANT)
        ):
            role = repr(before[place - 1]["role"]) if place else "none"
            raise DataError(
                f"{where}: message {place - len(example.prompt)} of {name!r} has the role {_TOOL!r}, but the role of the message before "
                f"it is {role}; expected 'assistant' or 'tool'",
                hint="put each tool result after the message that calls the tool, or remove the row",
            )
    for place in places:
        turn = response[place]
        content = turn.get("content")
        said = content.strip() if isinstance(content, str) else content
        if not said and not turn.get("tool_calls"):
            raise DataError(
                f"{where}: message {place} of {name!r} is an empty answer; expected text or tool calls",
                hint="remove the row",
            )


def _check_pair(example: RawExample, where: str) -> None:
    if example.responses[0] == example.responses[1]:
        raise _equal(where)
    for name, response in zip(_SIDES, example.responses, strict=True):
        if not isinstance(response, str) and not _is_assistant(response[0]):
            raise DataError(
                f"{where}: {name!r} begins with a message of the role {response[0]['role']!r}; expected the assistant's answer "
                "to the prompt",
                hint="remove the prompt's messages from 'chosen' and 'rejected', or remove the prompt's column",
            )


def _equal(where: str) -> DataError:
    return DataError(
        f"{where}: 'chosen' and 'rejected' are equal; expected two different answers",
        hint="remove the row",
    )


def _is_assistant(turn: Mapping[str, Any]) -> bool:
    return bool(turn["role"] == ASSISTANT)


def count_tokens(examples: Iterable[Example]) -> int:
    """Return the number of tokens of prompts and answers; a pair's prompt counts with each of its answers."""
    return sum(len(e.prompt_ids) + len(answer.ids) for e in examples for answer in e.answers)
