"""Converts rows to examples: conversations and preference pairs as token ids, with a mask of the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces import BadRow, Examples, Tokenizer, digest_of
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.encoding import Parts, TextEncoder
from dovetail_datasets.end_of_turn import TurnEnds
from dovetail_datasets.example_rows import (
    Example,
    RawExample,
    TrainedResponse,
    Turns,
    count_tokens,
    row_parser,
)
from dovetail_datasets.example_texts import (
    AnswerText,
    TrainedConversation,
    conversations_of,
    templated,
    texts_of,
    tokenised,
)
from dovetail_datasets.generation_blocks import check_blocks
from dovetail_datasets.image_prompts import ImageRenderer
from dovetail_datasets.images import FoundImage, count_images
from dovetail_datasets.left_out import LeftOut, Tally
from dovetail_datasets.limits import (
    Truncation,
    beyond,
    check_truncation,
    too_long,
    truncated,
    truncates,
)
from dovetail_datasets.models.classes import text_config
from dovetail_datasets.rendering import (
    ROWS_AT_ONCE,
    check_template,
    check_template_args,
    in_batches,
    made_or_bad,
)
from dovetail_datasets.rows import FileRows, NumberedRow
from dovetail_datasets.shards import ShardFacts
from dovetail_datasets.tokenizer import check_ids, stop_tokens

_SETTINGS = (
    "prompt_key",
    "messages_key",
    "image_key",
    "plain_prompts",
    "control_tokens",
    "trained_turns",
    "max_prompt_length",
    "max_response_length",
    "max_length",
    "overlong_prompts",
)
"""Keys of `data` that determine the examples, and thus the key of the token cache."""


class ExampleMaker:
    """Checks rows, renders them with the chat template, and tokenises them.

    Args:
        files: the files, each with its first rows, from which the columns are known.
        tokenizer: a Hugging Face tokenizer.
        section: the data section, with the limits and the columns.
        model: the section of the model that takes the examples.
        kind: the kind of example.
        media_dir: see `load_prompts`.
        text_alone: whether rows with images are refused.
        known: the model's vocabulary and stop tokens, if already known; reading them loads torch.

    Raises:
        DataError: a file lacks a column.
        ConfigError: truncation is configured, and is not defined for this kind of example.
    """

    def __init__(
        self,
        files: Sequence[FileRows],
        tokenizer: Tokenizer,
        section: DataSection,
        model: ModelSection,
        kind: Examples,
        media_dir: Path | None = None,
        *,
        text_alone: bool = False,
        known: tuple[int | None, tuple[int, ...]] | None = None,
    ) -> None:
        check_truncation(section, kind)
        # The section is pickled for other processes, which may not be able to load the config classes of plugins.
        own = DataSection()
        plain = attrs.evolve(section, source=own.source, sampler=own.sampler, mixture={})
        self._given = files, tokenizer, plain, model, kind, media_dir
        self._media_dir = media_dir or Path(section.media_dir or "media")
        self.text_alone = text_alone
        self._parse = row_parser(files, kind, section)
        self._tokenizer, self._section, self._model = tokenizer, section, model
        self._encoders = [TextEncoder(tokenizer, section.control_tokens)]
        self._known = known or (
            getattr(text_config(model.path, model), "vocab_size", None),
            stop_tokens(model, tokenizer),
        )
        self._ends = TurnEnds(tokenizer, lambda: self._known[1])
        self._checked = self._pictures = False
        self.left_out = LeftOut(self._text_of)
        """Record of the content that the chat template left out of the rows so far."""

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ExampleMaker, text_alone=self.text_alone, known=self._known)
        return make, self._given

    def follows_from(self) -> dict[str, Any]:
        """Return the inputs, besides the rows, the tokenizer and the code, that are part of the key of cached examples."""
        files, _, section, _, kind, _ = self._given
        return {
            **{key: getattr(section, key) for key in _SETTINGS},
            "kind": kind,
            "columns": sorted({column for file in files for column in file.columns}),
            "known": self._known,
        }

    def shard(self, rows: Sequence[NumberedRow]) -> tuple[ShardFacts, list[Example]]:
        """Convert rows to examples; for errors see `load_datasets`.

        Returns:
            Facts about the rows, which include the bad rows; and the examples of the rows that are neither bad nor too long.
        """
        self.left_out.tally, spelled, self._pictures = Tally(), self._spelled, False
        made = made_or_bad(self, rows, self._encoders, self._section.max_bad_rows)
        examples = [each for each in made if isinstance(each, Example)]
        bad = [
            BadRow.of(row.number, row.where, each)
            for row, each in zip(rows, made, strict=True)
            if isinstance(each, DataError)
        ]
        facts = ShardFacts(
            rows=len(rows),
            bad=tuple(bad),
            overlong=len(made) - len(examples) - len(bad),
            truncated=Truncation.of((e.lost for e in examples), count_tokens(examples)),
            spelled=self._spelled - spelled,
            left_out=self.left_out.tally,
            images=self._pictures,
            digest=digest_of(examples),
        )
        return facts, examples

    @property
    def _spelled(self) -> int:
        """Number of control tokens that the texts of the rows so far contain; see `TextEncoder`."""
        return sum(encoder.spelled for encoder in self._encoders)

    def __call__(self, rows: Sequence[NumberedRow]) -> list[Example | None]:
        """Return an example for each row, or None if the row is too long and left out; for errors see `load_datasets`."""
        parsed = [self._parsed(row) for row in rows]
        self._check_template(parsed)
        # Rows with images are rendered one by one, since the bytes of images are large.
        at_once = 1 if any(example.images for example in parsed) else ROWS_AT_ONCE
        made: list[Example | None] = []
        left_out = list[tuple[frozenset[str], str]]()
        for place, (answers, images) in in_batches(
            self._render, parsed, lambda i: rows[i].where, at_once
        ):
            example = _example(rows[place], parsed[place], answers)
            if images:
                example = attrs.evolve(example, answers=tuple(map(self._marked, example.answers)))
            else:
                for ids_T in (example.prompt_ids, *(answer.ids for answer in example.answers)):
                    check_ids(ids_T, self._known[0], self._tokenizer, rows[place].where)
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
                where = rows[place].where
                left_out.append((self.left_out.of(conversations_of(parsed[place]), where), where))
            if not excess and images:
                media = tuple(image.kept(self._media_dir) for image in images)
                example = attrs.evolve(example, media=media)
            made.append(None if excess else example)
        for found, where in left_out:
            self.left_out.tally.add(found, where)
        return made

    def _parsed(self, row: NumberedRow) -> RawExample:
        if isinstance(row.columns, DataError):
            raise row.columns
        self._pictures |= bool(row.columns.get(self._section.image_key))
        parsed = self._parse(row.columns, row.where, row.folder)
        self._pictures |= bool(parsed.images)
        return parsed

    def _render(
        self, examples: Sequence[RawExample]
    ) -> list[tuple[list[Parts], tuple[FoundImage, ...]]]:
        """Return, for each example, the parts of its answers with the prompt, and its images."""
        texts = iter(
            tokenised(self._encoders[0], [e for e in examples if not e.images], self._ends)
        )
        return [self._render_with_images(e) if e.images else (next(texts), ()) for e in examples]

    def _render_with_images(
        self, example: RawExample
    ) -> tuple[list[Parts], tuple[FoundImage, ...]]:
        if self.text_alone:
            raise DataError(
                "the row has images, but the run did not check that its engines support them: no row read before the start had images",
                hint="move a row with images to the beginning of the dataset, or set data.streaming=false",
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
        tokenizer = self._images.encoder.tokenizer
        return TurnEnds(tokenizer, lambda: stop_tokens(self._model, tokenizer))

    def _text_of(self, conversation: TrainedConversation) -> tuple[Tokenizer, AnswerText]:
        encoder, ends = self._encoders[0], self._ends
        if count_images(conversation.messages):
            encoder, ends = self._images.encoder, self._image_ends
        (text,) = templated(encoder, [conversation], ends)
        return encoder.tokenizer, text

    def _marked(self, answer: TrainedResponse) -> TrainedResponse:
        """Return an answer with a mask of the image placeholders that the template wrote into it, which are not trained on."""
        stands_T = (answer.ids == self._images.image_token) & ~answer.mask
        return attrs.evolve(answer, image_mask=stands_T) if stands_T.any() else answer

    def _image_tokens(self, example: Example, part: str) -> int:
        """Return the number of image placeholders in a part of an example.

        Args:
            example: the example.
            part: `prompt`; `response`, for the longest response; or `example`, for the sum of the two.
        """
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
    assert not isinstance(row.columns, DataError)
    place, data_source = row.where, row.columns.get("data_source")
    if not parts[0][0]:
        raise DataError(f"{place}: the prompt has no tokens", hint="remove the row")
    if any(answer[0] != parts[0][0] for answer in parts):
        raise DataError(
            f"{place}: the chat template renders the prompt of 'chosen' differently from that of 'rejected'",
            hint="set data.trained_turns=last, or set model.chat_template to a template that only appends text",
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
    """Return the messages before the first trained turn, or the prompt's text."""
    (first, *_) = raw.responses
    if isinstance(raw.prompt, str) or isinstance(first, str):
        return raw.prompt
    return [*raw.prompt, *first][: raw.trained(first)[0]]
