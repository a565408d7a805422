"""DatasetSource and Sampler: the origin and the order of prompts."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces.media import MediaRef
from dovetail.interfaces.plugin import Plugin, PluginConfig

GroundTruth: TypeAlias = Any
"""The right answer that a row of data gives: any JSON value, in the form that the row's reward function expects."""


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """One row of a dataset, ready to generate from."""

    index: int
    """Index that identifies the prompt within an epoch. Without a mixture: the index of the prompt's row among the rows of all files,
    before filtering. In a mixture, where an epoch may contain a row twice: an index that no other prompt of the epoch has."""
    prompt_ids: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.int64))
    """int64 [P]: token ids as the model sees them, each image expanded to its tokens; empty if only texts are scored."""
    raw: Any
    """The row's prompt: messages or a plain string."""
    dataset: str = ""
    """Name of the prompt's dataset in `data.mixture`; empty without a mixture."""
    data_source: str | None = None
    ground_truth: GroundTruth = None
    extra_info: Mapping[str, Any] | None = None
    where: str = ""
    """File and row of the prompt, for messages."""
    response: str | None = None
    """The row's own response as text; None if it has none."""
    media: tuple[MediaRef, ...] = ()
    """References to the prompt's images, in the order of their tokens."""
    epoch: int = 0
    """Number of the pass over the data that issues the prompt, from 0."""
    attempt: int = 0
    """Number of times that the prompt was issued before in the same epoch."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The key of the prompt in the ledger, which records what happened to every row: epoch, index, attempt."""
        return self.epoch, self.index, self.attempt

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays that identify the prompt in a digest: its token ids, int64 [P]."""
        return (self.prompt_ids,)

    def __str__(self) -> str:
        return self.where or f"row {self.index}"


PlacedRow: TypeAlias = tuple[str, Mapping[str, Any] | DataError]
"""File and row number, for messages, and the row's columns; an error instead of the columns if only this row can't be read."""


class RowGroups(ABC):
    """The rows of a dataset in row groups, as in a Parquet file. Each row group is read in order, when it is needed."""

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Number of rows of each group, at least 1."""

    @abstractmethod
    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        """Yield a group's rows, each preceded by its file and row number for messages.

        Args:
            group: the index of the group in `sizes`.
            start: the first row to yield, counted within the group.

        Raises:
            DataError: a file is unreadable, or has changed since its rows were counted; the error names the file.
        """

    def folder(self, _group: int) -> str | None:
        """Return the base directory of relative paths in a group's rows; None if there is none."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of the rows; different rows have different digests. A run is resumed only on rows with the same digest."""


class InMemoryGroups(RowGroups):
    """The rows of a dataset that is completely in memory, in row groups of at most 1,024 rows.

    Args:
        rows: all rows.
        places: the file and row number of each of `rows`, for messages; by default the index in `rows`.

    Raises:
        TypeError: the rows have no length, or can't be indexed by integers.
    """

    _SIZE = 1024

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[str] | None = None
    ) -> None:
        by_number = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        if not by_number or isinstance(rows, (str, bytes, Mapping)):
            raise TypeError(f"rows are of type {type(rows).__name__}; expected a list of mappings")
        self._rows, self._places = rows, places

    @property
    def sizes(self) -> tuple[int, ...]:
        whole, rest = divmod(len(self._rows), self._SIZE)
        return (self._SIZE,) * whole + ((rest,) if rest else ())

    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        first = group * self._SIZE
        for number in range(first + start, first + self.sizes[group]):
            where = self._places[number] if self._places is not None else f"row {number}"
            yield where, self._rows[number]

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps(row, default=repr).encode())
        return digest.hexdigest()


class DatasetSource(Plugin):
    """Reads the rows of a dataset.

    Rows of prompts have verl's schema: `prompt`, and optional `data_source`, `reward_model`, `extra_info`, `images`, `tools` and
    `response`. Rows of examples have `messages`, or `prompt` and `response`, or `prompt`, `chosen` and `rejected` (see
    `Trainer.examples`). Nulls in tool calls and tools are shown to the model, so a source that reads Arrow leaves out the keys that
    Arrow filled with null.
    """

    @abstractmethod
    def read(self, paths: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return all rows of these files, in order.

        Raises:
            DataError: a file is missing, empty, unreadable or lacks a column; the error names file and row.
        """

    def stream(self, paths: Sequence[str]) -> RowGroups:
        """Return the rows of these files, read as needed; by default `read`'s rows, all in memory.

        Raises:
            DataError: see `read`.
        """
        return InMemoryGroups(self.read(paths))

    @classmethod
    def write(cls, config: PluginConfig, rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
        """Write rows from a Python program to a file that `read` reads, and return the file's path. Its name is derived from the rows.

        Args:
            config: the plugin's own config.
            rows: all rows.
            folder: the directory of the file; created if missing.

        Raises:
            DataError: the rows can't be written; by default always.
        """
        raise DataError(
            f"the dataset source {cls.name!r} can't take rows from a Python program",
            hint="write the rows to a file that the source reads, or set data.source.name=files: that source takes such rows",
        )


class Sampler(Plugin):
    """Chooses the order of rows in an epoch, from seed, size and epoch alone, so that a sampler needs no state."""

    @abstractmethod
    def order(self, size: int, epoch: int) -> np.ndarray:
        """Return a permutation of 0 … size − 1, int64 [size]: the order of an epoch's rows.

        Args:
            size: the number of rows. For a streamed dataset, row groups and then the rows of each window are permuted in place of rows;
                for a mixture, also the positions of an epoch.
            epoch: the number of the epoch, from 0; or of the pass over a dataset of a mixture, or of the window.
        """
