"""DataRecipe: converts the rows of a public dataset to rows that can be trained on directly."""

from __future__ import annotations

import glob
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import attrs

from dovetail.errors import DataError, nearest
from dovetail.interfaces import Examples, PlacedRow, Plugin, PluginContext
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection

Split = Literal["train", "validation", "test"]
T = TypeVar("T")


class UnusedRow(NamedTuple):
    """What `DataRecipe.convert` returns for a row that is left out. These rows are counted by reason."""

    reason: str
    """The reason, such as `the two answers are equal`. Rows with the same text are counted together."""


def _is_share(_instance: object, field: Any, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{field.name!r} is {value}; expected a number above 0 and below 1")


@attrs.frozen(kw_only=True)
class RecipeSection(PluginSection):
    """Settings of every recipe."""

    held_out: float = attrs.field(default=0.02, validator=_is_share)
    """Share of the prompts that become validation rows, if the dataset has no validation split."""
    seed: int = 1
    """Seed for choosing the held-out prompts."""
    overlap: Literal["error", "drop"] = "error"
    """Treatment of training rows whose prompt is also a validation or test row's: raise an error, or drop and count them."""


class DataRecipe(Plugin):
    """Turns the rows of a public dataset into rows that are ready to train on, for `dovetail data prepare`.

    The list of recipes shows the first line of the class's docstring. Rows come from files on the hub or from a local copy; a recipe that
    generates its rows overrides `patterns`, `read` and `made_with`.
    """

    interface_api: ClassVar[str] = "1.0"
    Config = RecipeSection

    repository: ClassVar[str] = ""
    """The dataset on the hub, such as `openai/gsm8k`; empty if the recipe generates its rows."""
    licence: ClassVar[str]
    """The dataset's licence as its card gives it; the card of the downloaded files takes precedence."""
    train_files: ClassVar[str] = ""
    """A pattern of the files to train on, relative to the repository; `{field}` is replaced by the config's field of this name."""
    validation_files: ClassVar[str] = ""
    """A pattern of the held-out files; without it, a share of the training prompts is held out."""
    test_files: ClassVar[str] = ""
    """A pattern of the test split's files; empty if there is no such split."""
    rows_are: ClassVar[Examples] = "prompts"
    """The kind of the recipe's rows: prompts for a policy, or examples."""
    scored_by: ClassVar[str] = ""
    """The reward function for the recipe's prompts, selected by their `data_source`; empty if the rows are not prompts."""
    model: ClassVar[str] = "Qwen/Qwen2.5-0.5B-Instruct"
    """A model that can be trained on the rows, for the training command that is printed."""
    distinct: ClassVar[bool] = False
    """Whether only the first of several rows with the same prompt is kept."""
    argument: ClassVar[str] = ""
    """The config field that VALUE sets in `dovetail data prepare NAME:VALUE`; empty if there is none."""
    changes: ClassVar[tuple[str, ...]]
    """The changes that the recipe makes to the dataset's rows, as sentences for the card."""

    @abstractmethod
    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | UnusedRow:
        """Return a row to train on, or an UnusedRow if this row is left out.

        Args:
            row: the row of the dataset, by column.
            where: the row's file and number, for messages.

        Returns:
            For prompts: `prompt` (messages), `data_source` and `reward_model` with `ground_truth`; optionally `extra_info`, `images`,
            `tools`, and `response` (a reference answer that gets the full score). For preferences: `prompt`, `chosen` and `rejected`,
            all of them messages; optionally `margin`. For conversations: `messages`; optionally `tools`. Tool calls and tools are JSON
            text, since Parquet gives all mappings of a column the same keys.

        Raises:
            DataError: a column is missing, or a value differs in type or form from the dataset's card.
        """

    def patterns(self) -> dict[Split, str]:
        """Return the pattern of the files of each split that the dataset has, with the config's values in place of `{field}`."""
        given: dict[Split, str] = {
            "train": self.train_files,
            "validation": self.validation_files,
            "test": self.test_files,
        }
        values = attrs.asdict(self.config)
        return {split: text.format_map(values) for split, text in given.items() if text}

    def read(self, split: Split, folder: Path) -> Iterable[PlacedRow]:
        """Yield the rows of a split, each preceded by its file and number.

        Args:
            split: one of `patterns`.
            folder: the folder with the repository's files.

        Raises:
            DataError: a file is missing or can't be read.
        """
        pattern = self.patterns()[split]
        magic = glob.has_magic(pattern)
        path = f"{glob.escape(str(folder)) if magic else folder}/{pattern}"
        source: Any = make_plugin(ref_for("dataset", PluginSection(name="files")), PluginContext())
        groups = source.stream([path])
        return _rows(groups)

    def made_with(self) -> str:
        """Return the name and version of the program that generates the rows; empty if the rows come from files."""
        return ""


def _rows(groups: Any) -> Iterator[PlacedRow]:
    for number in range(len(groups.sizes)):
        yield from groups.read(number)


def value_of(row: Mapping[str, Any], column: str, kind: type[T], where: str) -> T:
    """Return the value of a column.

    Args:
        row: the row of a dataset.
        column: the column's name.
        kind: the type that the dataset's card states: str, list, float, …; an int is accepted as float.
        where: file and row, for messages.

    Raises:
        DataError: the column is missing, or the value is null or of another type; the message names the column, the file and the row.
    """
    if column not in row:
        near = nearest(column, row)
        raise DataError(
            f"{where}: the row has no column {column!r}; its columns: {', '.join(row) or 'none'}",
            hint=f"check that this is the dataset of the recipe, and that it has not changed{f'; the nearest column is {near!r}' if near else ''}",
        )
    value: Any = row[column]
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind):
        raise wrong(where, column, value, kind.__name__)
    return value


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return the text of a column, which must not be empty; for errors see `value_of`."""
    text = value_of(row, column, str, where)
    if not text.strip():
        raise wrong(where, column, text, "a text that is not empty")
    return text


def messages_of(row: Mapping[str, Any], column: str, where: str) -> list[dict[str, str]]:
    """Return the messages of a column, each with only `role` and `content`; for errors see `value_of`."""
    messages = value_of(row, column, list, where)
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise wrong(where, column, messages, "a list of messages")
    place = f"{where}, {column!r}"
    return [
        {"role": text_of(m, "role", place), "content": value_of(m, "content", str, place)}
        for m in messages
    ]


def wrong(where: str, column: str, value: object, expected: str) -> DataError:
    """Return the error for a value that differs from the dataset's card.

    Args:
        where: file and row.
        column: the name of the column.
        value: the found value.
        expected: the expected value.
    """
    what = "null" if value is None else f"{type(value).__name__} {str(value)[:80]!r}"
    return DataError(
        f"{where}: the column {column!r} is {what}; expected {expected}",
        hint="correct the row, or remove it from the file",
    )
