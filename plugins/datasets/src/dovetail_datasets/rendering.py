"""Helpers for prompts and examples: rendering and tokenising rows in batches, and finding bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.interfaces import Tokenizer
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.chat_template import parse_template
from dovetail_datasets.encoding import TextEncoder

ROWS_AT_ONCE = 2048
"""The number of rows that are tokenised in one call."""
Row = TypeVar("Row")
Made = TypeVar("Made")


def check_template_args(section: DataSection) -> None:
    """Refuse arguments of the chat template for raw prompts, which bypass it.

    Raises:
        ConfigError: `data.chat_template_args` is set.
    """
    if section.chat_template_args:
        raise ConfigError(
            "data.chat_template_args has no effect with data.plain_prompts=raw: raw prompts do not go through the chat template",
            hint="leave data.chat_template_args out, or set data.plain_prompts=user_message",
        )


def check_template(tokenizer: Tokenizer, model: ModelSection) -> None:
    """Check that the tokenizer can render messages.

    Raises:
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template is not a Jinja template.
    """
    of = f"the tokenizer of {model.tokenizer_path or model.path!r}"
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ModelError(
            f"{of} has no chat template, so messages can't be rendered as a prompt",
            hint="set model.chat_template to a template or the path of a template file; or, if all prompts "
            "are texts, set data.plain_prompts=raw",
        )
    for text in template.values() if isinstance(template, Mapping) else [template]:
        parse_template(text, "model.chat_template" if model.chat_template else of)


def made_or_bad(
    make: Callable[[Sequence[Row]], Sequence[Made]],
    rows: Sequence[Row],
    encoders: Sequence[TextEncoder],
    most_bad: int,
) -> list[Made | DataError]:
    """Apply `make` to rows, and return each row's result, or its error if it is bad. Bad rows are found by bisection.

    Args:
        make: a function that converts several rows.
        rows: the rows in order.
        encoders: the encoders that `make` uses; a failed attempt does not change their counts of control tokens in texts.
        most_bad: the limit of bad rows.

    Raises:
        DataError: a row is bad, and no bad row is allowed.
    """
    before = [encoder.spelled for encoder in encoders]
    try:
        return list(make(rows))
    except DataError as error:
        if not most_bad:
            raise
        if len(rows) == 1:
            return [error]
    for place, encoder in enumerate(encoders):  # a failed attempt may have added an encoder
        encoder.spelled = before[place] if place < len(before) else 0
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [each for half in halves for each in made_or_bad(make, half, encoders, most_bad)]


def in_batches(
    render: Callable[[Sequence[Row]], Sequence[Made]],
    parsed: Sequence[Row],
    place: Callable[[int], str],
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[tuple[int, Made]]:
    """Yield the index of every row with its result of `render`.

    Args:
        render: a function that converts several rows.
        parsed: the rows.
        place: a function that returns a row's file and number, by its index, for messages.
        at_once: the number of rows that are rendered together.

    Raises:
        DataError: a row can't be rendered; the message names it.
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
    """Return an error that names the bad row of a batch, found by rendering the rows one by one."""
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
