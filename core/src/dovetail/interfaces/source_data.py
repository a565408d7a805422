"""SourceData: the rows that a run learns from, as its source has read them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import Tokenizer


@attrs.frozen(kw_only=True)
class BadRow:
    """A row from which no prompt or example can be made."""

    row: int
    """Its number in the dataset."""
    where: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, row: int, where: str, error: DataError) -> BadRow:
        """Return a row that has an error."""
        return cls(row=row, where=where, message=error.message, hint=error.hint)

    @property
    def error(self) -> DataError:
        """The fault of the row."""
        return DataError(self.message, hint=self.hint)


@attrs.frozen(kw_only=True)
class DatasetShape:
    """The sizes of a dataset that the order of an epoch depends on."""

    name: str = ""
    """Name of the dataset in a mixture. If set, samples are numbered by place in the epoch, since a row may recur; else by row."""
    size: int
    """Rows."""
    weight: float | None = None
    """Weight of the dataset, which is divided by the sum of all weights; None for as many prompts as it has rows."""
    groups: tuple[int, ...] | None = None
    """Rows of each group that is read in sequence, where it is streamed."""


class IndexedPrompts(Sequence[Prompt]):
    """Prompts that are prepared on access, of rows that are known beforehand."""

    rows: np.ndarray
    """int64 [N]: the row of each place."""
    digest: str
    """A text that differs where the prompts do."""


class StreamedPrompts(IndexedPrompts):
    """Prompts of rows that need not fit into memory, each made a little before it is taken; `rows` are all rows."""

    bad: dict[int, BadRow | None]
    """Bad rows that were taken, by row number; None for those found before the run was resumed."""

    @abstractmethod
    def take(self, row: int) -> Prompt | BadRow | None:
        """Return the prompt of a row; None where it is too long.

        Raises:
            DataError: there are more bad rows than allowed.
        """

    @abstractmethod
    def follow(self, rows: np.ndarray) -> None:
        """Prepare rows ahead, and forget all others.

        Args:
            rows: int64 [R], in the order in which they will be taken.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop preparing rows ahead."""


@attrs.frozen(kw_only=True, eq=False)
class RowSet:
    """Rows of a run's data: to train on, or held out."""

    prompts: Sequence[Prompt]
    """Prompts ready to generate from, or examples ready to train on."""
    datasets: tuple[DatasetShape, ...] = ()
    """Datasets of the rows, where these are a mixture or streamed."""
    left_out: tuple[str, ...] = ()
    """The parts of the rows that the chat template leaves out, one sentence each."""
    bad: tuple[BadRow, ...] = ()
    """Rows that were left out because something is wrong with them; of streamed rows, those that were read."""
    streamed: str = ""
    """For streamed rows, how many of them were read now, and why."""

    @property
    def has_images(self) -> bool:
        """Whether a row has an image."""
        return any(prompt.media for prompt in self.prompts)

    def one_of_each(self) -> Sequence[Prompt]:
        """Return one prompt of each dataset, for checks in which all rows of a dataset are alike."""
        return list({prompt.dataset: prompt for prompt in self.prompts}.values())

    def __len__(self) -> int:
        return len(self.prompts)


@attrs.frozen(kw_only=True, eq=False)
class SourceData:
    """Tokenizer and rows of a run, as `ExperienceSource.load` returns them."""

    tokenizer: Tokenizer
    train: RowSet
    val: RowSet | None = None
    """Held-out rows; None where there are none."""
    rows_are: str = "prompts"
    """Name of the rows in the plural, for messages."""
    limits: str = ""
    """Limits on the length of rows, for messages."""
    notes: tuple[str, ...] = ()
    """Notes on the rows for `dovetail check`, a line each."""

    @property
    def sets(self) -> tuple[RowSet, ...]:
        """The training rows, and the held-out rows where there are any."""
        return (self.train,) if self.val is None else (self.train, self.val)

    @property
    def prompts(self) -> Iterator[Prompt]:
        """All rows, to train on and held out."""
        return chain.from_iterable(rows.prompts for rows in self.sets)

    @property
    def bad(self) -> Iterator[BadRow]:
        """Rows that were left out because of a fault; of streamed rows, those read so far."""
        return chain.from_iterable(rows.bad for rows in self.sets)

    @property
    def has_images(self) -> bool:
        """Whether a row has an image."""
        return any(rows.has_images for rows in self.sets)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of the rows that the chat template leaves out, one sentence each."""
        val = () if self.val is None else self.val.left_out
        return (*self.train.left_out, *(f"held-out rows: {what}" for what in val))


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return a digest of prompts or examples: their rows, tokens, trained tokens and images."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.index.to_bytes(8, "little"))
        for reference in prompt.media:
            digest.update(reference.digest.encode())
        for values in prompt.arrays:
            digest.update(len(values).to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()
