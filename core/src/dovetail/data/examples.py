"""Rows to examples: conversations and preference pairs as token ids, with a mask on what is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from dovetail.data.encoding import Parts, TextEncoder
from dovetail.data.end_of_turn import TurnEnds
from dovetail.data.example_rows import (
    Example,
    RawExample,
    TrainedResponse,
    Turns,
    row_parser,
)
from dovetail.data.example_texts import (
    AnswerText,
    TrainedConversation,
    conversations_of,
    templated,
    texts_of,
    tokenised,
)
from dovetail.data.generation_blocks import check_blocks
from dovetail.data.image_prompts import ImageRenderer
from dovetail.data.images import FoundImage, count_images
from dovetail.data.left_out import LeftOut
from dovetail.data.limits import (
    beyond,
    check_truncation,
    no_examples_left,
    too_long,
    truncated,
    truncates,
)
from dovetail.data.prompts import (
    ROWS_AT_ONCE,
    PromptSet,
    check_template,
    check_template_args,
    in_batches,
    read_rows,
)
from dovetail.data.rows import folder_of, where
from dovetail.data.tokenizer import check_ids, stop_tokens
from dovetail.errors import DataError
from dovetail.interfaces.data import DatasetSource
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.trainer import Examples
from dovetail.media.models import text_config
from dovetail.sections import DataSection, ModelSection


def load_examples(
    source: DatasetSource,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    section: DataSection,
    model: ModelSection,
    kind: Examples,
    media_dir: Path | None = None,
) -> PromptSet:
    """Read, check, template and tokenise every row.

    Args:
        source: reads the files.
        paths: files or patterns.
        tokenizer: a Hugging Face tokenizer.
        section: the limits and what happens beyond them, the prompt's column, plain prompts.
        model: for messages.
        kind: `conversations`, `preferences` or `unpaired_preferences`.
        media_dir: see `load_prompts`.

    Returns:
        Examples, as its prompts.

    Raises:
        DataError: a file, column, row or image is bad, the chat template writes earlier turns anew, an example has a token that the
            model has no embedding for, or is too long where that is refused, or none is left; or the template's blocks mark nothing.
        ModelError: messages are to be templated, and the tokenizer has no chat template; or rows have images, and the model
            takes none.
        ConfigError: the chat template has arguments, and raw texts do not go through it; what it marks can't be found; or
            preferences are to be truncated.
    """
    rows = read_rows(source, paths)
    make = ExampleMaker(rows, paths, tokenizer, section, model, kind, media_dir)
    made = make(
        [
            NumberedRow(index, row, where(rows, index), folder_of(rows, index))
            for index, row in enumerate(rows)
        ]
    )
    examples = [example for example in made if example is not None]
    overlong = len(made) - len(examples)
    if not examples:
        raise no_examples_left(kind, overlong, paths, section)
    return PromptSet(
        prompts=tuple(examples),
        filtered_overlong=overlong,
        truncated=sum(example.truncated for example in examples),
        spelled=make.spelled,
        left_out=make.left_out.notes(),
    )


class NumberedRow(NamedTuple):
    """A row of a dataset."""

    number: int
    columns: Mapping[str, Any]
    where: str
    """File and row, for messages."""
    folder: str | None
    """That relative paths count from."""


class ExampleMaker:
    """Checks, templates and tokenises rows.

    Args:
        rows: of all files, or the first ones; they tell which columns there are.
        paths: of the files.
        tokenizer: see `load_examples`, as for the following.
        section: limits, and how rows are read.
        model: for messages.
        kind: of example.
        media_dir: see `load_prompts`.

    Raises:
        DataError: a file lacks a column.
        ConfigError: examples are to be truncated, and that is not defined for them.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
        tokenizer: Tokenizer,
        section: DataSection,
        model: ModelSection,
        kind: Examples,
        media_dir: Path | None = None,
    ) -> None:
        check_truncation(section, kind)
        self._media_dir = media_dir or Path(section.media_dir or "media")
        self.text_alone = False
        """Whether rows with images are refused."""
        self._parse = row_parser(rows, kind, section, paths)
        self._tokenizer, self._section, self._model = tokenizer, section, model
        self._encoders = [TextEncoder(tokenizer, section.control_tokens)]
        self._ends = self._ends_of(tokenizer)
        self._text = text_config(model.path, model)
        self._checked = False
        self.left_out = LeftOut(self._text_of)
        """What the chat template leaves out of the rows so far."""

    @property
    def spelled(self) -> int:
        """How many control tokens the rows so far spell, which are encoded as text."""
        return sum(encoder.spelled for encoder in self._encoders)

    def __call__(self, rows: Sequence[NumberedRow]) -> list[Example | None]:
        """Return an example for each row, or None where it is too long and such rows are left out; errors as of `load_examples`."""
        parsed = [self._parse(row.columns, row.where, row.folder) for row in rows]
        self._check_template(parsed)
        # Of images, whose bytes are large, one by one.
        at_once = 1 if any(example.images for example in parsed) else ROWS_AT_ONCE
        made: list[Example | None] = []
        for place, (answers, images) in in_batches(
            self._render, parsed, lambda i: rows[i].where, at_once
        ):
            example = _example(rows[place], parsed[place], answers)
            if images:
                example = attrs.evolve(example, answers=tuple(map(self._marked, example.answers)))
            else:
                for ids_T in (example.prompt_ids, *(answer.ids for answer in example.answers)):
                    check_ids(ids_T, self._text, self._tokenizer, rows[place].where)
            if truncates(self._section):
                example = truncated(example, self._section, images=bool(images))
            excess = beyond(example, self._section)
            if excess and self._section.overlong_prompts == "error":
                raise too_long(
                    rows[place].where,
                    *excess,
                    self._image_tokens(example, excess[0]) if images else 0,
                )
            if not excess:
                self.left_out.add(conversations_of(parsed[place]), rows[place].where)
            if not excess and images:
                media = tuple(image.kept(self._media_dir) for image in images)
                example = attrs.evolve(example, media=media)
            made.append(None if excess else example)
        return made

    def _ends_of(self, tokenizer: Tokenizer) -> TurnEnds:
        return TurnEnds(tokenizer, lambda: stop_tokens(self._model, tokenizer))

    def _render(
        self, examples: Sequence[RawExample]
    ) -> list[tuple[list[Parts], tuple[FoundImage, ...]]]:
        """The parts of every example's answers, each with its prompt; and the images."""
        texts = iter(
            tokenised(self._encoders[0], [e for e in examples if not e.images], self._ends)
        )
        return [self._render_with_images(e) if e.images else (next(texts), ()) for e in examples]

    def _render_with_images(
        self, example: RawExample
    ) -> tuple[list[Parts], tuple[FoundImage, ...]]:
        if self.text_alone:
            raise DataError(
                "it has images, and none of the first rows has, for which the engines were checked",
                hint="put a row with images first, or set data.streaming=false",
            )
        if isinstance(example.prompt, str):
            example = attrs.evolve(example, prompt=self._images.raw(example.prompt))
        encoder = self._images.encoder
        texts = texts_of(encoder, [example], self._image_ends)
        return self._images.expanded(
            encoder.parts(texts), texts[0][0], example.images, example.folder
        )

    @cached_property
    def _images(self) -> ImageRenderer:
        images = ImageRenderer(self._tokenizer, self._section, self._model)
        check_blocks(images.encoder.tokenizer, of=repr(self._model.path))
        self._encoders.append(images.encoder)
        return images

    @cached_property
    def _image_ends(self) -> TurnEnds:
        return self._ends_of(self._images.encoder.tokenizer)

    def _text_of(self, conversation: TrainedConversation) -> tuple[Tokenizer, AnswerText]:
        encoder, ends = self._encoders[0], self._ends
        if count_images(conversation.messages):
            encoder, ends = self._images.encoder, self._image_ends
        (text,) = templated(encoder, [conversation], ends)
        return encoder.tokenizer, text

    def _marked(self, answer: TrainedResponse) -> TrainedResponse:
        """An answer of an example with images, with the mask of its own ones."""
        stands_T = (answer.ids == self._images.image_token) & ~answer.mask
        return attrs.evolve(answer, image_mask=stands_T) if stands_T.any() else answer

    def _image_tokens(self, example: Example, part: str) -> int:
        """How many tokens of the prompt, of the longest response, or of both (`example`) stand for images."""
        longest = max(example.answers, key=lambda answer: len(answer.ids)).image_mask
        found = {
            "prompt": int((example.prompt_ids == self._images.image_token).sum()),
            "response": 0 if longest is None else int(longest.sum()),
        }
        return found.get(part, sum(found.values()))

    def _check_template(self, parsed: Sequence[RawExample]) -> None:
        if any(isinstance(example.prompt, str) for example in parsed):
            check_template_args(self._section)
        templated = (e for e in parsed if not isinstance(e.prompt, str) and not e.images)
        if not self._checked and any(True for _ in templated):
            check_template(self._tokenizer, self._model)
            check_blocks(self._tokenizer, of=repr(self._model.path))
            self._checked = True


def _example(row: NumberedRow, raw: RawExample, parts: Sequence[Parts]) -> Example:
    place, data_source = row.where, row.columns.get("data_source")
    if not parts[0][0]:
        raise DataError(f"{place}: the prompt has no tokens", hint="remove the row")
    if any(answer[0] != parts[0][0] for answer in parts):
        raise DataError(
            f"{place}: the chat template writes the prompt of 'chosen' in another way than that of 'rejected'",
            hint="set data.trained_turns=last, or model.chat_template to a template that only ever appends",
        )
    answers = [
        TrainedResponse(
            ids=np.array([token for part in answer for token in part], np.int64),
            mask=np.repeat(np.arange(len(answer)) % 2 == 0, [len(part) for part in answer]),
        )
        for _, *answer in parts
    ]
    return Example(
        index=row.number,
        prompt_ids=np.array(parts[0][0], np.int64),
        raw=_before(raw),
        where=place,
        data_source=None if data_source is None else str(data_source),
        answers=tuple(answers),
        labels=raw.labels,
    )


def _before(raw: RawExample) -> Turns | str:
    """What stands before the first turn that is trained on."""
    (first, *_) = raw.responses
    if isinstance(raw.prompt, str) or isinstance(first, str):
        return raw.prompt
    return [*raw.prompt, *first][: raw.trained(first)[0]]
