"""Leaves out, refuses or truncates rows that are longer than the limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from dovetail.errors import ConfigError, DataError
from dovetail.sections import DataSection
from dovetail_datasets.example_rows import Example, TrainedResponse

_PROMPT, _RESPONSE, _BOTH = "data.max_prompt_length", "data.max_response_length", "data.max_length"
_TRUNCATE_RIGHT = "truncate_right"


@attrs.frozen
class Truncation:
    """Counts of what was cut from rows that exceed their limits."""

    rows: int = 0
    """The number of rows that were cut."""
    of_rows: int = 0
    """The number of rows that are kept, whether cut or not."""
    tokens: int = 0
    """The number of tokens that were cut off."""
    of_tokens: int = 0
    """The number of tokens of the kept rows, including those that were cut off."""

    def __add__(self, other: Truncation) -> Truncation:
        return Truncation(*map(sum, zip(attrs.astuple(self), attrs.astuple(other), strict=True)))

    def __str__(self) -> str:
        rows = f"{self.rows:,} of {self.of_rows:,} ({self.rows / max(self.of_rows, 1):.1%})"
        return f"{rows}, with {self.tokens:,} of {self.of_tokens:,} tokens lost ({self.tokens / max(self.of_tokens, 1):.1%})"

    @classmethod
    def of(cls, lost: Iterable[int], tokens: int) -> Truncation:
        """Return the counts for rows of which some were cut.

        Args:
            lost: the number of tokens that were cut off from each row.
            tokens: the number of tokens of all rows after cutting.
        """
        lost = [*lost]
        total = sum(lost)
        return cls(sum(count > 0 for count in lost), len(lost), total, tokens + total)


def truncates(section: DataSection) -> bool:
    """Return whether rows beyond the limits are truncated."""
    return section.overlong_prompts.startswith("truncate")


def kept_places(length: int, limit: int, how: str) -> np.ndarray:
    """Return the indices of the tokens that remain, int64 [limit], ascending.

    Args:
        length: the number of tokens of a row, more than `limit`.
        limit: the number of tokens that remain.
        how: `truncate_left`, `truncate_right` or `truncate_middle`: where tokens are removed. With the
            middle removed, limit // 2 tokens remain before it.
    """
    before = {"truncate_left": 0, _TRUNCATE_RIGHT: limit}.get(how, limit // 2)
    return np.concatenate([np.arange(before), np.arange(length - limit + before, length)])


def check_truncation(section: DataSection, kind: str) -> None:
    """Refuse truncation where it is not defined for the examples.

    Args:
        section: the data section, with the handling of long examples.
        kind: the kind of example, such as `conversations`.

    Raises:
        ConfigError: the examples are preferences, or truncation is not at the end and `data.max_length` is not set.
    """
    how = section.overlong_prompts
    if truncates(section) and kind != "conversations":
        raise ConfigError(
            f"data.overlong_prompts={how} truncates only prompts and conversations; {kind.replace('_', ' ')} can't be truncated",
            hint="set data.overlong_prompts=filter or data.overlong_prompts=error",
        )
    if truncates(section) and how != _TRUNCATE_RIGHT and section.max_length is None:
        raise ConfigError(
            f"data.overlong_prompts={how} truncates conversations to {_BOTH} tokens, but {_BOTH} is not set",
            hint=f"set {_BOTH} to the number of tokens of prompt and response together, or set data.overlong_prompts={_TRUNCATE_RIGHT}",
        )


def truncated(example: Example, section: DataSection, *, images: bool) -> Example:
    """Return a conversation cut to its limits; unchanged if it is short enough, or if cutting would leave nothing to train on or drop an
    image.

    The result ends with a trained token. If the beginning or middle is cut, the tokens before the first trained one become the prompt,
    which has at least one token.

    Args:
        example: the conversation, an example with one answer.
        section: the data section, with the limits and the place of the cut.
        images: whether the example has images.
    """
    (answer,) = example.answers
    before, whole = len(example.prompt_ids), section.max_length
    if section.overlong_prompts == _TRUNCATE_RIGHT:
        limit = section.max_response_length if whole is None else max(whole - before, 0)
        return _without_end(example, answer, limit)
    ids = np.concatenate([example.prompt_ids, answer.ids])
    if whole is None or len(ids) <= whole or images:
        return example
    mask = np.concatenate([np.zeros(before, bool), answer.mask])
    places = kept_places(len(ids), whole, section.overlong_prompts)
    ids, mask = ids[places], mask[places]
    mask[0] = False  # the first token is not predicted from any other
    trained = np.flatnonzero(mask)
    if not len(trained):
        return example
    own = slice(int(trained[0]), int(trained[-1]) + 1)
    cut = TrainedResponse(ids=ids[own], mask=mask[own])
    lost = before + len(answer.ids) - own.stop
    return attrs.evolve(example, prompt_ids=ids[: own.start], answers=(cut,), lost=lost)


def _without_end(example: Example, answer: TrainedResponse, limit: int) -> Example:
    trained, image_mask = np.flatnonzero(answer.mask[:limit]), answer.image_mask
    if len(answer.ids) <= limit or not len(trained):
        return example
    end = int(trained[-1]) + 1
    if image_mask is not None and image_mask[end:].any():
        return example
    cut = TrainedResponse(
        ids=answer.ids[:end],
        mask=answer.mask[:end],
        image_mask=None if image_mask is None else image_mask[:end],
    )
    return attrs.evolve(example, answers=(cut,), lost=len(answer.ids) - end)


def beyond(example: Example, section: DataSection) -> tuple[str, int, str, int] | None:
    """Return the part of an example that is too long, its number of tokens, and the limit's key and value; None if no part is too long."""
    prompt = len(example.prompt_ids)
    response = max(len(answer.ids) for answer in example.answers)
    if section.max_length is not None:
        parts = [("example", prompt + response, _BOTH, section.max_length)]
    else:
        parts = [
            ("prompt", prompt, _PROMPT, section.max_prompt_length),
            ("response", response, _RESPONSE, section.max_response_length),
        ]
    return next((part for part in parts if part[1] > part[3]), None)


def too_long(
    place: str, what: str, tokens: int, key: str, limit: int, of_images: int = 0
) -> DataError:
    """Return the error about a part of a row that is too long.

    Args:
        place: the row's file and number.
        what: the part, such as `prompt`.
        tokens: the number of the part's tokens.
        key: the config key of the limit.
        limit: the key's value.
        of_images: how many of the tokens stand for images.
    """
    images = f", {of_images} of them for images" if of_images else ""
    return DataError(
        f"{place}: the {what} has {tokens} tokens{images}, more than {key}={limit}",
        hint=f"raise {key}, or set data.overlong_prompts=filter",
    )


def no_examples_left(
    kind: str, count: int, paths: Sequence[str], section: DataSection
) -> DataError:
    """Return the error for a dataset whose examples are all too long."""
    keys = (
        f"{_PROMPT}={section.max_prompt_length} or {_RESPONSE}={section.max_response_length}"
        if section.max_length is None
        else f"{_BOTH}={section.max_length}"
    )
    return DataError(
        f"no {kind.replace('_', ' ')} of {', '.join(paths)} are left: every row ({count:,} in all) is longer than {keys} tokens",
        hint=f"raise {_BOTH if section.max_length is not None else f'{_PROMPT} or {_RESPONSE}'}",
    )


def no_prompts_left(lengths: Sequence[int], paths: Sequence[str], limit: int) -> DataError:
    """Return the error for a dataset whose prompts, of these lengths in tokens, are all too long."""
    longest = max(lengths)
    has = f"{longest}" if min(lengths) == longest else f"{min(lengths)} to {longest}"
    who, are, were, they_have = (
        ("the one prompt", "is", "was", "it has")
        if len(lengths) == 1
        else (f"all {len(lengths)} prompts", "are", "were", "they have")
    )
    return DataError(
        f"{who} of {', '.join(paths)} {are} longer than {_PROMPT}={limit} tokens and {were} filtered out: "
        f"{they_have} {has} tokens",
        hint=f"set {_PROMPT}={longest} or more",
    )
