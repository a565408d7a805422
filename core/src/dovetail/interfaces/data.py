"""DatasetSource and Sampler: where prompts come from, and in which order."""

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
    """Row number over all files, before filtering; in a mixture, place in the epoch: the prompt's identity within an epoch."""
    prompt_ids: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.int64))
    """int64 [P]: token ids as the model sees them, each image expanded to its tokens; empty where only texts are scored."""
    raw: Any
    """The row's prompt: messages or a plain string."""
    dataset: str = ""
    """Name of the prompt's dataset in `data.mixture`."""
    data_source: str | None = None
    ground_truth: GroundTruth = None
    extra_info: Mapping[str, Any] | None = None
    where: str = ""
    """File and row that it came from, for messages."""
    response: str | None = None
    """The row's own response, where it has one as text."""
    media: tuple[MediaRef, ...] = ()
    """Its images by reference, in the order of their tokens."""
    epoch: int = 0
    """Pass over the data in which it is issued."""
    attempt: int = 0
    """Number of times that the prompt was issued before in that epoch."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The key of the prompt in the ledger: epoch, index, attempt."""
        return self.epoch, self.index, self.attempt

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays that identify the prompt in a digest: its token ids, int64 [P]."""
        return (self.prompt_ids,)

    def __str__(self) -> str:
        return self.where or f"row {self.index}"


PlacedRow: TypeAlias = tuple[str, Mapping[str, Any] | DataError]
"""A row's place, for messages, and its columns; an error in place of the columns where this row alone can't be read."""


class RowGroups(ABC):
    """Rows of a dataset in groups; a group is read sequentially, when it is needed."""

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Rows of each group; at least one."""

    @abstractmethod
    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        """Yield a group's rows, each preceded by its file and row number for messages.

        Args:
            group: the number of the group.
            start: the first row to yield, counted within the group.

        Raises:
            DataError: a file is unreadable, or has changed since its rows were counted; names it.
        """

    def folder(self, _group: int) -> str | None:
        """Return the directory that relative paths in a group's rows count from; None where there is none."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """Return a text that differs between different rows: a run is only resumed on the same rows."""


class InMemoryGroups(RowGroups):
    """Rows that are in memory as a whole, in groups.

    Args:
        rows: all rows.
        places: the place of each row, for messages; by default its number.

    Raises:
        TypeError: the rows have no length, or can't be indexed by number.
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

    Rows of prompts have verl's schema: `prompt`, and optional `data_source`, `reward_model`, `extra_info`, `images`, `tools`, and a `response`.
    Rows of examples have `messages`; `prompt` and `response`; or `prompt`, `chosen` and `rejected` (see `Trainer.examples`). Nulls in
    calls and tools are shown to the model, so a source that reads Arrow leaves out keys that Arrow filled with null.
    """

    @abstractmethod
    def read(self, paths: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return all rows of these files, in order.

        Raises:
            DataError: a file is missing, empty, unreadable or lacks a column; names the file and row.
        """

    def stream(self, paths: Sequence[str]) -> RowGroups:
        """Return the rows of these files, read as needed; by default `read`'s rows, all in memory.

        Raises:
            DataError: see `read`.
        """
        return InMemoryGroups(self.read(paths))

    @classmethod
    def write(cls, config: PluginConfig, rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
        """Write rows from a Python program to a file that `read` reads, and return its path. The file's name is derived from its content.

        Args:
            config: the plugin's own config.
            rows: all rows.
            folder: the directory of the file; created where missing.

        Raises:
            DataError: the rows can't be written; by default always.
        """
        raise DataError(
            f"the dataset source {cls.name!r} reads files only, and can't take rows from a Python program",
            hint="write them into a file that it reads, or set data.source.name=files",
        )


class Sampler(Plugin):
    """The order of an epoch: a function of seed and epoch alone, so that it needs no state."""

    @abstractmethod
    def order(self, size: int, epoch: int) -> np.ndarray:
        """Return int64 [size]: a permutation of the rows."""
