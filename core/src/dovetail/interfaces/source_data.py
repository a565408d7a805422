"""SourceData: the rows of a run, as the run's source has read them."""

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
    """Index of the row in the dataset, from 0."""
    where: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, row: int, where: str, error: DataError) -> BadRow:
        """Return a bad row with the message and the hint of an error."""
        return cls(row=row, where=where, message=error.message, hint=error.hint)

    @property
    def error(self) -> DataError:
        """The row's fault as an error."""
        return DataError(self.message, hint=self.hint)


@attrs.frozen(kw_only=True)
class DatasetShape:
    """The sizes of a dataset that the order of an epoch depends on."""

    name: str = ""
    """Name of the dataset in a mixture, where prompts are not identified by their rows, since a row may recur; empty without a mixture."""
    size: int
    """Number of rows."""
    weight: float | None = None
    """Weight of the dataset, relative to the sum of all weights; None for as many prompts as the dataset has rows."""
    groups: tuple[int, ...] | None = None
    """Number of rows of each row group (see `RowGroups.sizes`) if the dataset is streamed; else None."""


class IndexedPrompts(Sequence[Prompt]):
    """Prompts that are prepared on access. The row of each prompt is known in advance."""

    rows: np.ndarray
    """int64 [N]: index of each prompt's row among all rows, before filtering."""
    digest: str
    """Digest of the prompts; different prompts have different digests."""


class StreamedPrompts(IndexedPrompts):
    """Prompts of rows that need not fit into memory, each prepared shortly before it is taken. `rows` lists all rows."""

    bad: dict[int, BadRow | None]
    """Bad rows that `take` has found, by the index of the row; None in place of those that were found before the run was resumed."""

    @abstractmethod
    def take(self, row: int) -> Prompt | BadRow | None:
        """Return the prompt of a row, a BadRow if the row is faulty, or None if the prompt is too long.

        Raises:
            DataError: there are more bad rows than allowed.
        """

    @abstractmethod
    def follow(self, rows: np.ndarray) -> None:
        """Prepare the prompts of these rows ahead, and forget all other prompts.

        Args:
            rows: indices of rows, int64 [R], in the order in which `take` will get them.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop preparing prompts ahead."""


@attrs.frozen(kw_only=True, eq=False)
class RowSet:
    """The training rows or the held-out rows of a run."""

    prompts: Sequence[Prompt]
    """Prompts ready to generate from, or examples ready to train on."""
    datasets: tuple[DatasetShape, ...] = ()
    """Datasets of the rows if the rows are a mixture or streamed; else empty."""
    left_out: tuple[str, ...] = ()
    """Notes for the user on content of the rows that the chat template leaves out, such as tool calls; a sentence each."""
    bad: tuple[BadRow, ...] = ()
    """Rows that were left out because of a fault; for streamed rows, only those read so far."""
    streamed: str = ""
    """For streamed rows, a sentence that says how many of them were read and why the rows are streamed; empty for other rows."""

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return any(prompt.media for prompt in self.prompts)

    def one_of_each(self) -> Sequence[Prompt]:
        """Return one prompt of each dataset, for checks with the same result for all rows of a dataset."""
        return list({prompt.dataset: prompt for prompt in self.prompts}.values())

    def __len__(self) -> int:
        return len(self.prompts)


@attrs.frozen(kw_only=True, eq=False)
class SourceData:
    """Tokenizer and rows of a run, as `ExperienceSource.load` returns them."""

    tokenizer: Tokenizer
    train: RowSet
    val: RowSet | None = None
    """Held-out rows; None if there are none."""
    rows_are: str = "prompts"
    """Name of the rows in the plural, for messages."""
    limits: str = ""
    """Limits on the length of rows, for messages."""
    notes: tuple[str, ...] = ()
    """Notes on the rows for `dovetail check`, a line each."""

    @property
    def sets(self) -> tuple[RowSet, ...]:
        """The training rows, and the held-out rows if there are any."""
        return (self.train,) if self.val is None else (self.train, self.val)

    @property
    def prompts(self) -> Iterator[Prompt]:
        """All training rows and held-out rows."""
        return chain.from_iterable(rows.prompts for rows in self.sets)

    @property
    def bad(self) -> Iterator[BadRow]:
        """Rows that were left out because of a fault; for streamed rows, only those read so far."""
        return chain.from_iterable(rows.bad for rows in self.sets)

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return any(rows.has_images for rows in self.sets)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Notes for the user on content of the rows that the chat template leaves out, such as tool calls; a sentence each."""
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
