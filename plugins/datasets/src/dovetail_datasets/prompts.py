"""Converts rows to prompts: chat template, tokens, images, and the limit on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np

from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import BadRow, DatasetSource, Prompt, RowSet, Tokenizer
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.encoding import TextEncoder
from dovetail_datasets.example_texts import AnswerText, TrainedConversation
from dovetail_datasets.image_prompts import ImageRenderer, Rendered
from dovetail_datasets.images import count_images, shown
from dovetail_datasets.left_out import LeftOut
from dovetail_datasets.limits import Truncation, kept_places, no_prompts_left, too_long, truncates
from dovetail_datasets.message_form import Tools
from dovetail_datasets.models.classes import text_config
from dovetail_datasets.rendering import (
    ROWS_AT_ONCE,
    check_template,
    check_template_args,
    in_batches,
    made_or_bad,
)
from dovetail_datasets.rows import CheckedGroups, NumberedRow, by_file, check_bad_rows, numbered
from dovetail_datasets.schema import TOOLS, RawRow, check_column, parse_row
from dovetail_datasets.tokenizer import check_ids

_SHARED = ("data_source", "reward_model")
"""Columns that every file or no file must have, since they change the meaning of a row."""


@attrs.frozen(kw_only=True, eq=False)
class PromptSet(RowSet):
    """Prompts or examples of files, in their order."""

    filtered_overlong: int
    """The number of rows left out because they are longer than the limits."""
    truncated: Truncation = attrs.field(factory=Truncation)
    """Counts of what was cut from longer rows."""
    spelled: int = 0
    """The number of control tokens, such as an end of turn, in the texts of rows; they are encoded as plain text."""

    def notes(self, what: str, limits: str, section: DataSection) -> Iterator[str]:
        """Yield notes on the rows; counts of streamed rows cover those read so far.

        Args:
            what: the plural noun for the rows.
            limits: the length limits, as text for messages.
            section: the data section, with the handling of long rows and of control tokens.
        """
        if self.streamed:
            yield f"{what} are streamed: {self.streamed}"
        if self.bad:
            yield f"{len(self.bad):,} {what} are bad, and left out; the first: {self.bad[0].message}"
        if self.filtered_overlong:
            yield f"{self.filtered_overlong:,} {what} longer than {limits} are left out"
        if self.truncated.rows:
            yield f"{what} longer than {limits} are cut (data.overlong_prompts={section.overlong_prompts}): {self.truncated}"
        if self.spelled:
            yield (
                f"the texts of {what} contain {self.spelled:,} control tokens, such as an end of turn, which are encoded as "
                f"ordinary text (data.control_tokens={section.control_tokens})"
            )


def load_prompts(
    source: DatasetSource,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    section: DataSection,
    model: ModelSection,
    *,
    media_dir: Path | None = None,
    tools: Tools = None,
) -> PromptSet:
    """Read, check, render and tokenise every row.

    Args:
        source: the dataset source that reads the files.
        paths: files or patterns.
        tokenizer: a Hugging Face tokenizer.
        section: the data section: the limit on prompts and the handling of longer ones, the prompt's column, the handling of
            prompts that are plain text.
        model: the section of the model that takes the prompts.
        media_dir: the directory of images without a file of their own; by default `section.media_dir`, or else `media`
            in the working directory.
        tools: the functions of an agent loop, which the chat template describes in every prompt; by default those of
            each row.

    Raises:
        DataError: a file, a column, a row or an image is bad, no prompt is left, the model has no embedding for a prompt's token, or a
            prompt is too long and such prompts are refused.
        ModelError: the tokenizer lacks a chat template for messages, or the model takes no images and rows have some.
        ConfigError: template arguments or tools are set for raw prompts, which use no chat template.
    """
    rows = read_rows(source, paths)
    check_columns(rows, section.prompt_key, paths)
    parsed, bad = _parse(rows, section)
    keep_in = media_dir or Path(section.media_dir or "media")
    make = _PromptMaker(parsed, tokenizer, section, model, keep_in, tools)
    prompts: list[Prompt] = []
    overlong: list[int] = []
    lost: list[int] = []
    for start in range(0, len(parsed), ROWS_AT_ONCE):
        lot = parsed[start : start + ROWS_AT_ONCE]
        made = made_or_bad(make, lot, make.encoders, section.max_bad_rows)
        for each, one in zip(lot, made, strict=True):
            if isinstance(one, DataError):
                bad.append(BadRow.of(each.number, each.where, one))
                check_bad_rows(bad[-1], len(bad), section.max_bad_rows)
            elif one[0] is None:
                overlong.append(one[1])
            else:
                prompts.append(one[0])
                lost.append(one[1] - len(one[0].prompt_ids))
    if not prompts:
        if bad:
            raise bad[0].error
        raise no_prompts_left(overlong, paths, section.max_prompt_length)
    return PromptSet(
        prompts=tuple(prompts),
        filtered_overlong=len(overlong),
        truncated=Truncation.of(lost, sum(len(prompt.prompt_ids) for prompt in prompts)),
        spelled=sum(encoder.spelled for encoder in make.encoders),
        left_out=make.left_out.tally.notes(),
        bad=tuple(sorted(bad, key=lambda row: row.row)),
    )


class _Placed(NamedTuple):
    """A parsed row, with its index in the dataset (`number`) and its file and number as text (`where`)."""

    number: int
    where: str
    row: RawRow


class _PromptMaker:
    """Templates and tokenises rows; for errors see `load_prompts`."""

    def __init__(
        self,
        parsed: Sequence[_Placed],
        tokenizer: Tokenizer,
        section: DataSection,
        model: ModelSection,
        media_dir: Path,
        tools: Tools,
    ) -> None:
        self._raw = section.plain_prompts == "raw" and isinstance(parsed[0].row.prompt, str)
        if self._raw:
            check_template_args(section)
        if self._raw and tools:
            raise ConfigError(
                "the tools of rollout.agent_loop can't be described in the prompts: with data.plain_prompts=raw, prompts do not go through the chat template",
                hint="set data.plain_prompts=user_message",
            )
        self._section, self._tools, self._media_dir = section, tools, media_dir
        self._tokenizer = tokenizer
        self._vocabulary = getattr(text_config(model.path, model), "vocab_size", None)
        encoder = TextEncoder(tokenizer, section.control_tokens)
        rows = [each.row for each in parsed]
        has_images = any(row.images for row in rows)
        self._images = ImageRenderer(tokenizer, section, model) if has_images else None
        self.encoders = [encoder, self._images.encoder] if self._images else [encoder]
        if not self._raw and not all(row.images for row in rows):
            check_template(tokenizer, model)
        self.left_out = LeftOut(self._text_of, own_tools=tools is None)

    def __call__(self, lot: Sequence[_Placed]) -> list[tuple[Prompt | None, int]]:
        """Return a pair for each row: its prompt, or None if it is left out as too long; and its number of tokens before truncation."""
        lot = [_with_tools(each, self._tools, raw=self._raw) for each in lot]
        rows = [each.row for each in lot]
        made: list[tuple[Prompt | None, int]] = []
        left_out = list[tuple[frozenset[str], str]]()
        # Rows with images are rendered one by one, since the bytes of images are large.
        at_once = 1 if self._images else ROWS_AT_ONCE
        for place, rendered in in_batches(self._rendered, rows, lambda i: lot[i].where, at_once):
            number, where, row = lot[place]
            if not rendered.ids:
                raise DataError(f"{where}: the prompt has no tokens", hint="remove the row")
            prompt, fitted = None, _fitted(rendered, self._section, where)
            if fitted is not None:
                prompt = _prompt(number, fitted, row, where, self._media_dir)
                # The placeholder tokens of some models lie outside the vocabulary.
                known = None if rendered.images else self._vocabulary
                check_ids(prompt.prompt_ids, known, self._tokenizer, where)
                asked = TrainedConversation(row.messages, tools=row.tools)
                if not self._raw:
                    left_out.append((self.left_out.of([asked], where), where))
            made.append((prompt, len(rendered.ids)))
        for found, where in left_out:
            self.left_out.tally.add(found, where)
        return made

    def _rendered(self, rows: Sequence[RawRow]) -> list[Rendered]:
        """Render and tokenise rows: with images, by the model's processor; raw texts, by the tokenizer; others, by the chat template."""
        texts = [row for row in rows if not row.images]
        encoder, ids = self.encoders[0], list[list[int]]()
        if texts and self._raw:
            ids = _raw_ids(encoder.tokenizer, [str(row.prompt) for row in texts])
        elif texts:
            ids = encoder.ids(encoder.prompts([(row.messages, row.tools) for row in texts]))
        found = iter(ids)
        return [
            self._images(row) if self._images and row.images else Rendered(next(found), ())
            for row in rows
        ]

    def _text_of(self, conversation: TrainedConversation) -> tuple[Tokenizer, AnswerText]:
        encoder = self.encoders[-1 if count_images(conversation.messages) else 0]
        return encoder.tokenizer, encoder.prompts([(conversation.messages, conversation.tools)])


def read_rows(source: DatasetSource, paths: Sequence[str]) -> list[NumberedRow]:
    """Return all rows of these files; for errors see `CheckedGroups`."""
    groups = CheckedGroups(source, paths)
    rows: list[NumberedRow] = []
    for group in range(len(groups.sizes)):
        rows += numbered(groups, group, 0, len(rows))
    return rows


def check_columns(rows: Sequence[NumberedRow], key: str, paths: Sequence[str]) -> None:
    """Refuse files without the prompt's column, and files of which only some have `data_source` or `reward_model`."""
    files = by_file(rows, paths)
    for file in files:
        check_column(file.rows, key, file.columns, file.path)
    for column in _SHARED:
        having = [file for file in files if column in file.columns]
        lacking = [file for file in files if column not in file.columns]
        if having and lacking:
            raise DataError(
                f"the files have different columns: {having[0].path} has the column {column!r}, but "
                f"{lacking[0].path} does not (its columns: {', '.join(lacking[0].columns)})",
                hint=f"add the column {column!r} to all files, or remove it from all",
            )


def _parse(rows: Sequence[NumberedRow], section: DataSection) -> tuple[list[_Placed], list[BadRow]]:
    """Return the parsed rows and the bad rows; prompts must be all texts or all messages."""
    parsed: list[_Placed] = []
    bad: list[BadRow] = []
    for number, columns, place, folder in rows:
        try:
            row = parse_row(
                columns, section.prompt_key, place, image_key=section.image_key, folder=folder
            )
            if row.begun:
                _check_begun(row, section, place)
            if parsed:
                _check_same_form(parsed[0], row, place)
        except DataError as error:
            bad.append(BadRow.of(number, place, error))
            check_bad_rows(bad[-1], len(bad), section.max_bad_rows)
        else:
            parsed.append(_Placed(number, place, row))
    if not parsed:
        raise bad[0].error
    return parsed, bad


def _check_begun(row: RawRow, section: DataSection, where: str) -> None:
    last = row.messages[-1]
    if not section.continue_answer:
        raise DataError(
            f"{where}: the prompt ends with a message of the role 'assistant', {shown(last.get('content'))}; expected another role",
            hint="set data.continue_answer=true if the policy should continue this message, or remove the message",
        )
    if last.get("tool_calls") or not last.get("content"):
        raise DataError(
            f"{where}: the prompt ends with a message of the role 'assistant' that has tool calls or no text, which can't be continued",
            hint="add the results of the tool calls, or remove the message",
        )


def _check_same_form(first: _Placed, row: RawRow, where: str) -> None:
    kinds = ["text" if isinstance(each.prompt, str) else "messages" for each in (first.row, row)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"the prompts have different forms: {first.where} has {kinds[0]}, {where} has {kinds[1]}",
            hint="write all prompts as text, or all as messages",
        )


def _with_tools(placed: _Placed, tools: Tools, *, raw: bool) -> _Placed:
    """Return the row with the functions that its prompt describes: the agent loop's if there are any, else the row's own."""
    row = placed.row
    if row.tools and raw:
        raise DataError(
            f"{placed.where}: the row has the column {TOOLS!r}, but with data.plain_prompts=raw its prompt does not go through the chat template, which would describe the tools",
            hint="set data.plain_prompts=user_message, or remove the column",
        )
    if row.tools and tools is not None and row.tools != list(tools):
        raise DataError(
            f"{placed.where}: the functions in the column {TOOLS!r} differ from those of rollout.agent_loop, which the prompt describes",
            hint="remove the column, or change the agent loop's `chat_tools` to return the same functions",
        )
    return placed._replace(row=attrs.evolve(row, tools=tools)) if tools else placed


def _raw_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Tokenise texts. The tokenizer adds no special tokens to a text that already begins with the beginning-of-sequence token."""
    bos = getattr(tokenizer, "bos_token", None)
    begun = [bool(bos and text.startswith(bos)) for text in texts]
    ids = {}
    for flag in {*begun}:
        alike = [text for text, there in zip(texts, begun, strict=True) if there is flag]
        ids[flag] = iter(tokenizer(alike, add_special_tokens=not flag)["input_ids"])
    return [next(ids[flag]) for flag in begun]


def _fitted(rendered: Rendered, section: DataSection, place: str) -> Rendered | None:
    """Return a prompt within its limit, truncated if so configured; None if it is left out.

    Raises:
        DataError: the prompt is too long, and such prompts are refused.
    """
    length, limit = len(rendered.ids), section.max_prompt_length
    if length <= limit:
        return rendered
    if section.overlong_prompts == "error":
        tokens = rendered.image_tokens if rendered.images else 0
        raise too_long(place, "prompt", length, "data.max_prompt_length", limit, tokens)
    if rendered.images or not truncates(section):
        return None
    places = kept_places(length, limit, section.overlong_prompts)
    return Rendered([rendered.ids[i] for i in places], ())


def _prompt(index: int, rendered: Rendered, row: RawRow, place: str, media_dir: Path) -> Prompt:
    return Prompt(
        index=index,
        prompt_ids=np.asarray(rendered.ids, dtype=np.int64),
        raw=row.prompt,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        response=row.response,
        where=place,
        media=tuple(image.kept(media_dir) for image in rendered.images),
    )
