"""Rows to prompts: chat template, tokens, images, and the limit on the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np

from dovetail.data.chat_template import parse_template
from dovetail.data.encoding import TextEncoder
from dovetail.data.epoch_order import DatasetShape
from dovetail.data.example_texts import AnswerText, TrainedConversation
from dovetail.data.image_prompts import ImageRenderer, Rendered
from dovetail.data.images import count_images
from dovetail.data.left_out import LeftOut
from dovetail.data.limits import kept_places, no_prompts_left, too_long, truncates
from dovetail.data.message_form import Tools
from dovetail.data.rows import Rows, folder_of, where
from dovetail.data.schema import TOOLS, RawRow, check_column, parse_row
from dovetail.data.tokenizer import check_ids
from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.interfaces.data import DatasetSource, Prompt
from dovetail.interfaces.plugin import Tokenizer
from dovetail.media.models import text_config
from dovetail.sections import DataSection, ModelSection

ROWS_AT_ONCE = 2048
"""Rows that go through the tokenizer in one call."""


@attrs.frozen(kw_only=True, eq=False)
class PromptSet:
    """Prompts ready to generate from, in the order of the files."""

    prompts: Sequence[Prompt]
    filtered_overlong: int
    """Rows left out because their prompt is longer than the limit."""
    truncated: int = 0
    """Rows that were cut to the limit."""
    spelled: int = 0
    """How many control tokens the rows spell, which are encoded as text."""
    datasets: tuple[DatasetShape, ...] = ()
    """What they are made of, where that is a mixture or streamed."""
    left_out: tuple[str, ...] = ()
    """What the chat template leaves out of the rows, a sentence each."""

    @property
    def has_images(self) -> bool:
        """Whether a prompt has an image."""
        return any(prompt.media for prompt in self.prompts)

    def one_of_each(self) -> Sequence[Prompt]:
        """Return a prompt of each dataset: the rows of one are alike."""
        return list({prompt.dataset: prompt for prompt in self.prompts}.values())

    def __len__(self) -> int:
        return len(self.prompts)


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
    """Read, check, template and tokenise every row.

    Args:
        source: reads the files.
        paths: files or patterns.
        tokenizer: a Hugging Face tokenizer.
        section: the limit on prompts and what happens beyond it, the prompt's column, plain prompts.
        model: for messages.
        media_dir: where images without a file of their own are written; `section.media_dir` where absent, and else
            `media` in the working directory.
        tools: functions of an agent loop, which the chat template describes in every prompt; those of each row where absent.

    Raises:
        DataError: a file, column, row or image is bad, a prompt has a token that the model has no embedding for, or is too long
            where that is refused, or none is left.
        ModelError: messages are to be templated, and the tokenizer has no chat template; or rows have images, and the
            model takes none.
        ConfigError: the chat template has arguments or tools, and raw prompts do not go through it.
    """
    rows = read_rows(source, paths)
    _check_columns(rows, section.prompt_key, paths)
    parsed = _parse(rows, section)
    raw = section.plain_prompts == "raw" and isinstance(parsed[0].prompt, str)
    if raw:
        check_template_args(section)
        if tools:
            raise ConfigError(
                "the agent loop's tools have no place in the prompts: data.plain_prompts=raw, and raw prompts do not go through the chat template",
                hint="set data.plain_prompts=user_message",
            )
    parsed = _with_tools(parsed, tools, lambda i: where(rows, i), raw=raw)
    keep_in = media_dir or Path(section.media_dir or "media")
    images = ImageRenderer(tokenizer, section, model) if any(r.images for r in parsed) else None
    encoder = TextEncoder(tokenizer, section.control_tokens)
    render = _renderer(encoder, section, model, parsed, images)
    text = text_config(model.path, model)
    prompts: list[Prompt] = []
    overlong: list[int] = []
    cut = 0

    def text_of(conversation: TrainedConversation) -> tuple[Tokenizer, AnswerText]:
        used = images.encoder if images and count_images(conversation.messages) else encoder
        given = conversation.messages, conversation.tools
        return used.tokenizer, used.texts([given], generate=True)

    left_out = LeftOut(text_of, own_tools=tools is None)
    # Of images, whose bytes are large, one by one.
    at_once = 1 if images else ROWS_AT_ONCE
    for index, rendered in in_batches(render, parsed, lambda i: where(rows, i), at_once):
        place = where(rows, index)
        if not rendered.ids:
            raise DataError(f"{place}: the prompt has no tokens", hint="remove the row")
        fitted = _fitted(rendered, section, place)
        if fitted is None:
            overlong.append(len(rendered.ids))
            continue
        cut += len(fitted.ids) < len(rendered.ids)
        prompt = _prompt(index, fitted, parsed[index], place, keep_in)
        # Some models keep the tokens of images elsewhere.
        check_ids(prompt.prompt_ids, None if rendered.images else text, tokenizer, place)
        if not raw:
            left_out.add(
                [TrainedConversation(parsed[index].messages, tools=parsed[index].tools)], place
            )
        prompts.append(prompt)
    if not prompts:
        raise no_prompts_left(overlong, paths, section.max_prompt_length)
    return PromptSet(
        prompts=tuple(prompts),
        filtered_overlong=len(overlong),
        truncated=cut,
        spelled=encoder.spelled + (images.encoder.spelled if images else 0),
        left_out=left_out.notes(),
    )


def read_rows(source: DatasetSource, paths: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """All rows of these files; see `DatasetSource.read`.

    Raises:
        DataError: there are none.
    """
    rows = source.read(paths)
    if not len(rows):
        raise DataError(f"there are no rows in {', '.join(paths)}", hint="name files with rows")
    return rows


def check_template_args(section: DataSection) -> None:
    """Refuse arguments of a chat template where raw texts do not go through it.

    Raises:
        ConfigError: there are some.
    """
    if section.chat_template_args:
        raise ConfigError(
            "data.chat_template_args has no effect: data.plain_prompts=raw, and raw prompts do not go through the chat template",
            hint="leave data.chat_template_args out, or set data.plain_prompts=user_message",
        )


def check_template(tokenizer: Tokenizer, model: ModelSection) -> None:
    """Check that messages can become text.

    Raises:
        ModelError: the tokenizer has no chat template.
        ConfigError: it is no Jinja template.
    """
    of = f"the tokenizer of {model.tokenizer_path or model.path!r}"
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ModelError(
            f"{of} has no chat template, so that messages can't become a prompt",
            hint="set model.chat_template to a template or its file; or, where prompts are plain "
            "strings, data.plain_prompts=raw",
        )
    for text in template.values() if isinstance(template, Mapping) else [template]:
        parse_template(text, "model.chat_template" if model.chat_template else of)


def _check_columns(rows: Sequence[Mapping[str, Any]], key: str, paths: Sequence[str]) -> None:
    if isinstance(rows, Rows):
        for file in rows.files:
            check_column(file.rows, key, file.columns, file.path)
    else:
        check_column(
            rows, key, list(dict.fromkeys(k for row in rows for k in row)), ", ".join(paths)
        )


def _parse(rows: Sequence[Mapping[str, Any]], section: DataSection) -> list[RawRow]:
    """Every row checked; plain and message prompts do not mix."""
    parsed = [
        parse_row(
            row,
            section.prompt_key,
            where(rows, index),
            image_key=section.image_key,
            folder=folder_of(rows, index),
        )
        for index, row in enumerate(rows)
    ]
    plain = isinstance(parsed[0].prompt, str)
    for index, row in enumerate(parsed):
        if isinstance(row.prompt, str) is not plain:
            kinds = ("text", "messages") if plain else ("messages", "text")
            raise DataError(
                f"prompts mix two schemas: {where(rows, 0)} holds {kinds[0]}, "
                f"{where(rows, index)} holds {kinds[1]}",
                hint="write all prompts in one form",
            )
    return parsed


def _with_tools(
    parsed: list[RawRow], tools: Tools, place: Callable[[int], str], *, raw: bool
) -> list[RawRow]:
    """The rows with the functions that their prompts describe: an agent loop's, or else each row's own."""
    for index, row in enumerate(parsed):
        if row.tools and raw:
            raise DataError(
                f"{place(index)}: it has {TOOLS!r}, and with data.plain_prompts=raw its prompt does not go through a chat template",
                hint="set data.plain_prompts=user_message, or remove the column",
            )
        if row.tools and tools is not None and row.tools != list(tools):
            raise DataError(
                f"{place(index)}: it has {TOOLS!r}, and what its prompt describes are the functions of rollout.agent_loop, which are others",
                hint="remove the column, or have the loop's chat_tools return the same functions",
            )
    return [attrs.evolve(row, tools=tools) for row in parsed] if tools else parsed


Render = Callable[[Sequence[RawRow]], list[Rendered]]
TextRender = Callable[[Sequence[RawRow]], list[list[int]]]


def _renderer(
    encoder: TextEncoder,
    section: DataSection,
    model: ModelSection,
    parsed: list[RawRow],
    images: ImageRenderer | None,
) -> Render:
    """What turns rows into token ids: rows with images through the model's processor, others as text."""
    of_text: TextRender | None = None
    if not all(row.images for row in parsed):
        of_text = _text_renderer(encoder, section, model, parsed)

    def render(rows: Sequence[RawRow]) -> list[Rendered]:
        texts = [row for row in rows if not row.images]
        ids_of_texts = iter(of_text(texts) if of_text is not None and texts else ())
        return [
            images(row) if images is not None and row.images else Rendered(next(ids_of_texts), ())
            for row in rows
        ]

    return render


def _text_renderer(
    encoder: TextEncoder,
    section: DataSection,
    model: ModelSection,
    parsed: list[RawRow],
) -> TextRender:
    """The chat template, or for raw texts the tokenizer alone."""
    if isinstance(parsed[0].prompt, str) and section.plain_prompts == "raw":
        return lambda rows: _raw_ids(encoder.tokenizer, [str(row.prompt) for row in rows])
    check_template(encoder.tokenizer, model)
    return lambda rows: encoder.ids(
        encoder.texts([(row.messages, row.tools) for row in rows], generate=True)
    )


def _raw_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the ids that the tokenizer gives; a text that has the beginning of sequence itself gets no special tokens."""
    bos = getattr(tokenizer, "bos_token", None)
    begun = [bool(bos and text.startswith(bos)) for text in texts]
    ids = {}
    for flag in {*begun}:
        alike = [text for text, there in zip(texts, begun, strict=True) if there is flag]
        ids[flag] = iter(tokenizer(alike, add_special_tokens=not flag)["input_ids"])
    return [next(ids[flag]) for flag in begun]


Row = TypeVar("Row")
Made = TypeVar("Made")


def in_batches(
    render: Callable[[Sequence[Row]], Sequence[Made]],
    parsed: Sequence[Row],
    place: Callable[[int], str],
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[tuple[int, Made]]:
    """Yield the number of every row and what `render` makes of it.

    Args:
        render: makes it of several rows.
        parsed: the rows.
        place: names a row by its number, for messages.
        at_once: rows that are rendered together.

    Raises:
        DataError: a row can't be rendered; names it.
    """
    for start in range(0, len(parsed), at_once):
        batch = parsed[start : start + at_once]
        try:
            rendered = render(batch)
        except Exception as error:  # templates and tokenizers raise what they like
            raise _bad_row(render, batch, start, place, error) from error
        yield from enumerate(rendered, start)


def _bad_row(
    render: Callable[[Sequence[Row]], object],
    batch: Sequence[Row],
    start: int,
    place: Callable[[int], str],
    error: Exception,
) -> DataError:
    """Which row of a batch it was: they are tried one by one."""
    for offset, row in enumerate(batch):
        try:
            render([row])
        except (DataError, ModelError) as own:
            return DataError(f"{place(start + offset)}: {own.message}", hint=own.hint)
        except Exception as own:  # noqa: BLE001 - as above
            return DataError(
                f"{place(start + offset)}: the chat template or tokenizer refused the row: "
                f"{type(own).__name__}: {own}",
                hint="correct the row, or set model.chat_template to a template that takes such messages",
            )
    last = start + len(batch) - 1
    rows_of_it = f"row {start}" if start == last else f"rows {start} to {last}"
    return DataError(f"the tokenizer failed on {rows_of_it}: {error}")


def _fitted(rendered: Rendered, section: DataSection, place: str) -> Rendered | None:
    """A prompt within its limit, cut where that is configured; None where it is left out.

    Raises:
        DataError: it is longer, and that is refused.
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
