"""StreamedExamples: examples of files that need not fit into memory, read and tokenised ahead in a thread."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

import attrs
import numpy as np

from dovetail.data.epoch_order import DatasetShape, EpochOrder
from dovetail.data.example_rows import Example
from dovetail.data.examples import ExampleMaker, NumberedRow
from dovetail.data.prompts import PromptSet
from dovetail.data.rows import FileRows, Rows
from dovetail.interfaces.data import PlacedRow, Prompt, RowGroups
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.trainer import Examples
from dovetail.sections import DataSection, ModelSection

ROWS_AT_ONCE = 256
"""Rows that are tokenised in one call."""
CALLS_AHEAD = 8
"""Such calls whose examples wait to be taken, at most."""


@attrs.frozen(kw_only=True, eq=False)
class StreamedDataset:
    """One of the datasets."""

    shape: DatasetShape
    rows: RowGroups
    make: Callable[[Sequence[NumberedRow]], list[Example | None]]
    """Examples of rows, None for each that is too long."""


class StreamedExamples(Sequence[Prompt]):
    """Examples by the number of their row.

    A thread reads along the order of the epochs: of each dataset a window of rows at a time, which the order shuffles, and makes
    examples of `ROWS_AT_ONCE`, of which `CALLS_AHEAD` lots wait. What a row becomes follows from the row alone, so that neither
    the thread's pace nor where it began changes an example.

    Args:
        datasets: in the order of their rows' numbers.
    """

    def __init__(self, datasets: Sequence[StreamedDataset]) -> None:
        self._datasets = tuple(datasets)
        sizes = [each.shape.size for each in datasets]
        self._offsets = np.cumsum([0, *sizes])
        self._lock = threading.Lock()  # tokenizers and templates are not made for two threads
        self._reader: _Reader | None = None

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Read a row out of order, as for what was in flight when a run stopped: its group is read up to it.

        Raises:
            DataError: the row is bad, or too long.
            IndexError: there is no such row.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._offsets, index, side="right")) - 1
        (row,) = _Cursor(self._datasets[number].rows).read([index - int(self._offsets[number])])
        (made,) = self._made([(number, row)])
        if made[1] is None:
            raise IndexError(f"row {index} is too long, and left out")
        return made[1]

    def follow(self, order: EpochOrder, epoch: int, position: int) -> None:
        """Begin to read ahead from a place of an order, in place of what was read ahead before.

        Args:
            order: used by the thread alone.
            epoch: pass over the data.
            position: place in it.
        """
        self.close()
        self._reader = _Reader(self._read_along(order, epoch, position))

    def take(self, row: int) -> Example | None:
        """Return the next example of this row; None where it is too long. What comes before it in the order is left out.

        Raises:
            DataError: a row up to it is bad.
        """
        assert self._reader is not None, "follow() comes before take()"
        return next(example for number, example in self._reader if number == row)

    def close(self) -> None:
        """End the thread."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def digest(self) -> str:
        """Return a text that differs where the rows, or the first examples of each dataset, do."""
        digest = hashlib.blake2b(digest_size=8)
        for number, each in enumerate(self._datasets):
            digest.update(each.rows.digest().encode())
            head = _head(each.rows, 8)
            for _, example in self._made([(number, row) for row in head]):
                if example is not None:
                    for reference in example.media:
                        digest.update(reference.digest.encode())
                    for ids in (example.prompt_ids, *(answer.ids for answer in example.answers)):
                        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()

    def _read_along(
        self, order: EpochOrder, epoch: int, position: int
    ) -> Iterator[list[tuple[int, Example | None]]]:
        """Examples with their rows' numbers, in lots, without end."""
        before = np.bincount(order.labels(epoch)[:position], minlength=len(self._datasets))
        sources = [
            self._drawn(number, order, epoch, int(count)) for number, count in enumerate(before)
        ]
        while True:
            labels = order.labels(epoch)[position:]
            for start in range(0, len(labels), ROWS_AT_ONCE):
                lot = labels[start : start + ROWS_AT_ONCE].tolist()
                yield self._made([(number, next(sources[number])) for number in lot])
            epoch, position = epoch + 1, 0

    def _drawn(
        self, number: int, order: EpochOrder, epoch: int, before: int
    ) -> Iterator[NumberedRow]:
        """A dataset's rows as the order draws them, numbered within it."""
        cursor = _Cursor(self._datasets[number].rows)
        for read, used in order.draws(number, epoch, before):
            window = {row.number: row for row in cursor.read(read.tolist())}
            yield from (window[row] for row in used.tolist())

    def _made(self, rows: Sequence[tuple[int, NumberedRow]]) -> list[tuple[int, Example | None]]:
        """The examples of rows, each given with its dataset's number."""
        made: dict[int, Iterator[Example | None]] = {}
        numbered = [
            (number, row._replace(number=int(self._offsets[number]) + row.number))
            for number, row in rows
        ]
        with self._lock:
            for number in dict.fromkeys(number for number, _ in rows):
                each = self._datasets[number]
                lot = each.make([row for of, row in numbered if of == number])
                name = each.shape.name
                made[number] = iter(
                    [e if e is None or not name else attrs.evolve(e, dataset=name) for e in lot]
                )
        return [(row.number, next(made[number])) for number, row in numbered]


@attrs.frozen(kw_only=True, eq=False)
class StreamedSet(PromptSet):
    """Examples that are read as they are taken: what is too long is not known before."""

    heads: tuple[Example, ...]
    """The first of each dataset."""
    first_images: bool = False
    """Whether one of the first rows has an image."""

    @property
    def has_images(self) -> bool:
        """Whether an example has an image: then one of the first rows has."""
        return self.first_images

    def one_of_each(self) -> Sequence[Prompt]:
        """Return an example of each dataset, of those whose first rows are not all too long."""
        return self.heads


class _Cursor:
    """Reads rows by their numbers; going forwards in a group costs nothing anew."""

    def __init__(self, rows: RowGroups) -> None:
        self._rows = rows
        self._starts = np.cumsum([0, *rows.sizes])
        self._group, self._next = -1, 0
        self._open: Iterator[PlacedRow] = iter(())

    def read(self, rows: Sequence[int]) -> Iterator[NumberedRow]:
        """Yield these rows, in their order."""
        for row in rows:
            group = int(np.searchsorted(self._starts, row, side="right")) - 1
            place = row - int(self._starts[group])
            if group != self._group or place < self._next:
                self._open = self._rows.read(group, place)
                self._group, self._next = group, place
            where, columns = next(islice(self._open, place - self._next, None))
            self._next = place + 1
            yield NumberedRow(row, columns, where, self._rows.folder(group))


def _head(rows: RowGroups, count: int) -> list[NumberedRow]:
    """The first rows of the first group."""
    found = enumerate(islice(rows.read(0), count))
    return [NumberedRow(i, row, where, rows.folder(0)) for i, (where, row) in found]


class _Reader:
    """Goes through lots of examples in a thread, and gives them one by one in another.

    Args:
        lots: made in the thread.
    """

    def __init__(self, lots: Iterator[list[tuple[int, Example | None]]]) -> None:
        self._lots = lots
        self._queue: queue.Queue[list[tuple[int, Example | None]] | Exception] = queue.Queue(
            CALLS_AHEAD
        )
        self._waiting: deque[tuple[int, Example | None]] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Example | None]]:
        while True:
            while not self._waiting:
                lot = self._queue.get()
                if isinstance(lot, Exception):
                    self._queue.put(lot)  # the thread has ended: asked again, it is the same error
                    raise lot
                self._waiting += lot
            yield self._waiting.popleft()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for lot in self._lots:
                if not self._put(lot):
                    return
        except Exception as error:  # noqa: BLE001 - raised again where examples are taken
            self._put(error)

    def _put(self, lot: list[tuple[int, Example | None]] | Exception) -> bool:
        """Wait for space; False where the reader was closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(lot, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def stream_examples(
    datasets: Mapping[str, tuple[RowGroups, Sequence[str], DataSection]],
    weights: Mapping[str, float | None],
    tokenizer: Tokenizer,
    model: ModelSection,
    kind: Examples,
    media_dir: Path | None = None,
) -> PromptSet:
    """Return examples that are read as they are taken; the first rows of each dataset are checked at once.

    Args:
        datasets: rows, the paths of their files, and how they are read, by name.
        weights: by name.
        tokenizer: a Hugging Face tokenizer, used by the thread that reads ahead.
        model: for messages.
        kind: `conversations` or `preferences`.
        media_dir: see `load_prompts`.

    Raises:
        DataError, ModelError, ConfigError: the first rows are bad; see `load_examples`.
    """
    made, heads, makers = [], list[Example](), list[ExampleMaker]()
    images = False
    for name, (rows, paths, section) in datasets.items():
        head = _head(rows, ROWS_AT_ONCE)
        files = Rows([FileRows(path=paths[0], rows=[row.columns for row in head])])
        make = ExampleMaker(files, paths, tokenizer, section, model, kind, media_dir)
        makers.append(make)
        kept = [attrs.evolve(e, dataset=name) for e in make(head) if e is not None]
        images = images or any(example.media for example in kept)
        heads += kept[:1]
        shape = DatasetShape(
            name=name, size=sum(rows.sizes), weight=weights.get(name), groups=tuple(rows.sizes)
        )
        made.append(StreamedDataset(shape=shape, rows=rows, make=make))
    # The engines are checked before the first step, for what the first rows have.
    for make in makers:
        make.text_alone = not images
    return StreamedSet(
        prompts=StreamedExamples(made),
        filtered_overlong=0,
        left_out=tuple(
            f"{each.shape.name}: {what}" if each.shape.name else what
            for each, make in zip(made, makers, strict=True)
            for what in make.left_out.notes()
        ),
        datasets=tuple(each.shape for each in made),
        heads=tuple(heads),
        first_images=images,
    )
