"""Examples of datasets that need not fit into memory. Their shards are read from the token cache, or made and written to the cache.

`CachedExamples` are tokenised before the run starts; `StreamedExamples` are tokenised shortly before a step takes them.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import attrs
import numpy as np

from dovetail.interfaces import (
    BadRow,
    DatasetShape,
    IndexedPrompts,
    Prompt,
    RowGroups,
    StreamedPrompts,
)
from dovetail_datasets.example_process import ExampleProcess
from dovetail_datasets.example_rows import Example
from dovetail_datasets.examples import ExampleMaker
from dovetail_datasets.rows import NumberedRow, check_bad_rows, numbered
from dovetail_datasets.shards import SHARD_ROWS, Shard, ShardFile, ShardFolder

_log = logging.getLogger("dovetail")
SAMPLED = 3
"""How many shards of each streamed dataset are read before the run starts: the first, and others at equal distances."""


class _Part(NamedTuple):
    """The location of one shard's rows: `size` consecutive rows of one row group."""

    dataset: int
    number: int
    """Index of the shard within its dataset."""
    group: int
    place: int
    """Index of the shard's first row within its row group."""
    first: int
    """Index of the shard's first row within its dataset."""
    size: int


@attrs.frozen(kw_only=True, eq=False)
class ExampleRows:
    """The rows of a dataset, and the `ExampleMaker` that tokenises them."""

    shape: DatasetShape
    offset: int
    """The number of rows in the datasets before this one."""
    rows: RowGroups
    make: ExampleMaker
    folder: ShardFolder | None
    """The folder of the dataset's shards in the token cache; None if shards are not cached."""


class ExampleShards:
    """The shards (tokenised examples of consecutive rows) of datasets, opened from the cache or made from the rows.

    Args:
        datasets: the datasets. Rows and shards are numbered through all of them, from 0, in this order.
    """

    def __init__(self, datasets: Sequence[ExampleRows]) -> None:
        self.datasets = tuple(datasets)
        self.processes = 1
        """Number of processes that make shards; with 1, this process makes them."""
        self._parts = [part for n, each in enumerate(datasets) for part in _parts(n, each.rows)]
        firsts = [self.datasets[part.dataset].offset + part.first for part in self._parts]
        self._firsts = np.array(firsts, np.int64)
        self.rows = sum(part.size for part in self._parts)
        """Number of rows of all datasets."""
        self._cursors = [_Cursor(each.rows) for each in datasets]
        self._reading, self._making = threading.Lock(), threading.Lock()
        self._workers: list[Any] = []
        self._executor: ThreadPoolExecutor | None = None
        self._asked: dict[int, Future[Shard]] = {}
        self._open: dict[int, Shard] = {}

    def missing(self) -> int:
        """Return the number of rows in shards that the cache lacked when it was opened."""
        folders = [each.folder for each in self.datasets]
        return sum(
            part.size
            for part in self._parts
            if (folder := folders[part.dataset]) is None or not folder.has(part.number)
        )

    def spread(self) -> list[int]:
        """Return the indices, over all datasets, of a few shards of each dataset: the first, and others at equal distances."""
        chosen: set[int] = set()
        for dataset in range(len(self.datasets)):
            own = [n for n, part in enumerate(self._parts) if part.dataset == dataset]
            chosen |= {own[place * len(own) // SAMPLED] for place in range(SAMPLED)}
        return sorted(chosen)

    def read(self, numbers: Iterable[int] | None = None) -> list[tuple[int, Shard]]:
        """Return shards, each preceded by the index of its dataset.

        Args:
            numbers: the indices of the shards over all datasets; None returns all shards.
        """
        wanted = range(len(self._parts)) if numbers is None else [*numbers]
        for number in wanted:
            self._ask(number)
        return [(self._parts[number].dataset, self._shard(number)) for number in wanted]

    def take(self, row: int) -> Example | BadRow | None:
        """Return the example made from a row; a BadRow with the error if the row is bad, and None if it is too long.

        Args:
            row: the index of the row over all datasets.

        Raises:
            DataError: the row's file has changed, or the row is bad and no bad row is allowed.
        """
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        dataset = self.datasets[self._parts[number].dataset]
        found = self._shard(number).get(row - dataset.offset)
        if isinstance(found, Example) and dataset.shape.name:
            return attrs.evolve(found, dataset=dataset.shape.name, index=row)
        return found

    def opened(self) -> Iterator[Example]:
        """Yield the examples of all shards that were read and not closed."""
        for number in sorted(self._open):
            shard, name = self._open[number], self.datasets[self._parts[number].dataset].shape.name
            for place in range(len(shard.rows)):
                yield attrs.evolve(shard.example(place), dataset=name)

    def follow(self, rows: np.ndarray) -> None:
        """Start to make the shards of the next rows, and close all others.

        Args:
            rows: the next rows, int64 [R], in the order in which they will be taken.
        """
        shards = np.searchsorted(self._firsts, rows, side="right") - 1
        needed = {*np.unique(shards).tolist()}
        for number in self._open.keys() - needed:
            del self._open[number]
        for number in self._asked.keys() - needed:
            self._asked.pop(number).cancel()
        for number in sorted(needed):
            self._ask(number)

    def close(self) -> None:
        """End the threads and processes that make shards; later requests start them again."""
        for future in self._asked.values():
            future.cancel()
        self._asked.clear()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        for worker in self._workers:
            if isinstance(worker, ExampleProcess):
                worker.close()
        self._workers.clear()

    def _shard(self, number: int) -> Shard:
        if number not in self._open:
            self._ask(number)
            self._open[number] = self._asked.pop(number).result()
        return self._open[number]

    def _ask(self, number: int) -> None:
        if number in self._open or number in self._asked:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.processes, thread_name_prefix="dovetail-data")
        self._asked[number] = self._executor.submit(self._made, number)

    def _made(self, number: int) -> Shard:
        """Open the shard with the index `number` (over all datasets) from the cache, or have it made; runs in a thread."""
        part = self._parts[number]
        dataset = self.datasets[part.dataset]
        # Only one thread reads at a time: cursors read a group's rows sequentially.
        with self._reading:
            if dataset.folder is not None and (
                found := dataset.folder.open(part.number, part.size)
            ):
                return found
            rows = self._cursors[part.dataset].read(part)
        try:
            worker = self._workers.pop()
        except IndexError:
            worker = self._worker()
        try:
            made: Shard | Path = worker(part.dataset, part.number, rows)
        finally:
            self._workers.append(worker)
        return ShardFile(made) if isinstance(made, Path) else made

    def _worker(self) -> Any:
        make = ShardMaker([(each.make, each.folder) for each in self.datasets])
        if self.processes > 1:
            # Some tokenizers that a model repository defines can't be pickled.
            try:
                return ExampleProcess(pickle.dumps(make))
            except Exception as error:  # noqa: BLE001 - examples are made here instead
                with self._making:
                    if self.processes > 1:
                        _log.warning(
                            "rows are tokenised by only one process, since another could not be started: %s",
                            error,
                        )
                    self.processes = 1

        def alone(*given: Any) -> Any:
            with self._making:
                return make(*given)

        return alone


class CachedExamples(IndexedPrompts):
    """The examples of datasets as a sequence, without rows that are too long or bad.

    Args:
        shards: the shards of the datasets.
        rows: int64 [E], for each example, the index over all datasets of the row from which it is made.
        digests: digests of the examples, from which the digest of the sequence is computed.
    """

    def __init__(self, shards: ExampleShards, rows: np.ndarray, digests: Iterable[str]) -> None:
        self.shards, self.rows = shards, rows
        self.digest = hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
        """A text that differs if the examples differ. For streamed rows: if the files differ, or the examples read before the start."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Return the example at a position, or the examples of a slice.

        Raises:
            DataError: the row's file has changed; or, in `StreamedExamples`, the row is bad.
            IndexError: the position is out of range; or, in `StreamedExamples`, the row is too long.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self.take(int(self.rows[index]))
        if isinstance(found, BadRow):
            raise found.error
        if found is None:
            raise IndexError(f"the example at position {index} is too long and was left out")
        return found

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    def take(self, row: int) -> Example | BadRow | None:
        """Return the example of a row; see `ExampleShards.take`."""
        return self.shards.take(row)


class StreamedExamples(CachedExamples, StreamedPrompts):
    """The examples of datasets by the index of their row, each prepared shortly before the trainer takes it.

    Args:
        shards: the shards of the datasets.
        digests: digests of the files, and of the examples read before the start.
        most_bad: the maximum number of bad rows (`data.max_bad_rows`).
    """

    def __init__(self, shards: ExampleShards, digests: Iterable[str], most_bad: int) -> None:
        super().__init__(shards, np.arange(shards.rows), digests)
        self._most_bad = most_bad
        self.bad: dict[int, BadRow | None] = {}
        """Bad rows that were taken, by the index of the row; None for those found before the run was resumed."""

    def take(self, row: int) -> Example | BadRow | None:
        """Return the example of a row; see `ExampleShards.take`.

        Raises:
            DataError: more rows are bad than allowed.
        """
        found = super().take(row)
        if isinstance(found, BadRow):
            self.bad.setdefault(row, found)
            check_bad_rows(found, len(self.bad), self._most_bad)
        return found

    def follow(self, rows: np.ndarray) -> None:
        """Start to make the shards of the next rows, and close all others.

        Args:
            rows: the next rows, int64 [R], in the order in which they will be taken.
        """
        self.shards.follow(rows)

    def close(self) -> None:
        """End the threads and processes that prepare shards ahead."""
        self.shards.close()


class ShardMaker:
    """Makes shards, and writes them to the cache if possible.

    Args:
        datasets: for each dataset, its `ExampleMaker` and the folder of its shards.
    """

    def __init__(self, datasets: Sequence[tuple[ExampleMaker, ShardFolder | None]]) -> None:
        self._datasets = datasets

    def __call__(self, dataset: int, number: int, rows: Sequence[NumberedRow]) -> Shard | Path:
        """Make a shard. Return the path of its file if it was written to the cache, else the shard itself.

        Args:
            dataset: the index of the dataset.
            number: the index of the shard within the dataset.
            rows: the rows of the shard.
        """
        make, folder = self._datasets[dataset]
        facts, examples = make.shard(rows)
        path = None if folder is None else folder.write(number, facts, examples)
        return path or Shard(facts, examples)


class _Cursor:
    """Reads the rows of one dataset's shards. A shard that follows the one read last in the same row group is read without seeking."""

    def __init__(self, rows: RowGroups) -> None:
        self._rows = rows
        self._group, self._next = -1, 0
        self._open: Iterator[NumberedRow] = iter(())

    def read(self, part: _Part) -> list[NumberedRow]:
        if (part.group, part.place) != (self._group, self._next):
            self._open = numbered(self._rows, part.group, part.place, part.first)
        self._group = -1  # after an error, the next read starts a new iterator
        rows = list(islice(self._open, part.size))
        self._group, self._next = part.group, part.place + part.size
        return rows


def _parts(dataset: int, rows: RowGroups) -> Iterator[_Part]:
    number = first = 0
    for group, size in enumerate(rows.sizes):
        for place in range(0, size, SHARD_ROWS):
            taken = min(SHARD_ROWS, size - place)
            yield _Part(dataset, number, group, place, first, taken)
            number, first = number + 1, first + taken
