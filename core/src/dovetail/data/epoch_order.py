"""EpochOrder: the row at each position of an epoch, for one dataset or a mixture, loaded or streamed.

An epoch has N prompts, N being the number of rows of all datasets. Of these, n_d = N w_d / Σ w, rounded, come from dataset d of weight w_d.
Each pass over a dataset has its own order, and may continue across the end of an epoch. A row depends only on the sampler and the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces.data import Sampler
from dovetail.interfaces.source_data import DatasetShape


class EpochOrder:
    """The order of rows in every epoch, over one dataset or a mixture.

    The sampler permutes rows. For a streamed dataset it permutes groups of rows, then the rows within each window of consecutive rows. For
    a mixture it also permutes the sequence of datasets that an epoch draws from.

    Args:
        sampler: the sampler of permutations.
        datasets: the datasets, at least one; either all of them have a weight, or none.
        window: the number of consecutive rows that are shuffled together; several streamed datasets share this number, in
            proportion to their shares of an epoch.
    """

    def __init__(
        self, sampler: Sampler, datasets: Sequence[DatasetShape], *, window: int = 1
    ) -> None:
        self._sampler, self._datasets = sampler, tuple(datasets)
        self.mixture = any(each.name for each in datasets)
        self._sizes = np.array([each.size for each in datasets], np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self.size = int(self._sizes.sum())
        self._counts = _shares([each.weight for each in datasets], self._sizes)
        self._ends = np.cumsum(self._counts)
        self._windows = np.maximum(1, window * self._counts // max(self.size, 1))
        self._labels: tuple[int, np.ndarray] | None = None
        self._passes: dict[int, tuple[int, np.ndarray]] = {}

    def rows(self, epoch: int) -> np.ndarray:
        """Return the row at each position of an epoch, int64 [N], as an index into the rows of all datasets, one after another."""
        if len(self._datasets) == 1:
            return self._pass(0, epoch)
        labels = self.labels(epoch)
        rows = np.empty(self.size, np.int64)
        for number, offset in enumerate(self._offsets):
            rows[labels == number] = offset + self._drawn(number, epoch)
        return rows

    def names(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Return the `Prompt.index` at each position of an epoch, int64 [N], which identifies the prompt within the epoch.

        Without a mixture the index is the row. In a mixture, where an epoch may contain a row twice, prompts are numbered from 0 to N − 1,
        dataset after dataset.

        Args:
            epoch: the epoch.
            rows: the result of `rows` for this epoch, int64 [N].
        """
        if not self.mixture:
            return rows
        labels = self.labels(epoch)
        names = np.empty(self.size, np.int64)
        for number, end in enumerate(self._ends):
            names[labels == number] = np.arange(end - self._counts[number], end)
        return names

    def labels(self, epoch: int) -> np.ndarray:
        """Return the index of the dataset from which each position of an epoch draws, int64 [N]."""
        if len(self._datasets) == 1:
            return np.zeros(self.size, np.int64)
        if self._labels is None or self._labels[0] != epoch:
            order = self._permutation(self.size, epoch)
            self._labels = epoch, np.searchsorted(self._ends, order, side="right")
        return self._labels[1]

    def _drawn(self, number: int, epoch: int) -> np.ndarray:
        """Return the rows that an epoch draws from the dataset with the index `number`, in order, int64 [n_d]."""
        count, size = int(self._counts[number]), int(self._sizes[number])
        first, last = epoch * count, (epoch + 1) * count
        parts = [np.zeros(0, np.int64)]
        for turn in range(first // size, -(-last // size)):
            start = turn * size
            parts.append(self._pass(number, turn)[max(first - start, 0) : last - start])
        return np.concatenate(parts)

    def _pass(self, number: int, turn: int) -> np.ndarray:
        """Return all rows of a dataset in the order of one pass, int64 [rows]; each dataset's latest pass is cached.

        Args:
            number: the index of the dataset.
            turn: the number of the pass over this dataset, from 0 over the whole run.
        """
        kept = self._passes.get(number)
        if kept is None or kept[0] != turn:
            if self._datasets[number].groups is None:
                order = self._permutation(int(self._sizes[number]), turn)
            else:
                order = np.concatenate(list(self._windows_of(number, turn)))
            kept = self._passes[number] = turn, order
        return kept[1]

    def _windows_of(self, number: int, turn: int) -> Iterator[np.ndarray]:
        """Yield the rows of each window, permuted, in one pass over a streamed dataset.

        The row groups, in the sampler's order, are concatenated and cut into windows. The arguments are those of `_pass`.
        """
        groups = np.array(self._datasets[number].groups, np.int64)
        starts = np.cumsum(groups) - groups
        parts = [
            np.arange(starts[group], starts[group] + groups[group])
            for group in self._permutation(len(groups), turn)
        ]
        read = np.concatenate(parts)
        width = int(self._windows[number])
        count = -(-len(read) // width)
        for place in range(count):
            window = read[place * width : (place + 1) * width]
            yield window[self._permutation(len(window), turn * count + place)]

    def _permutation(self, size: int, number: int) -> np.ndarray:
        """Return the sampler's permutation, int64 [size], checked because a sampler may be any plugin.

        Args:
            size: the number of rows, row groups or positions to permute.
            number: the number of the epoch, pass or window, passed to the sampler as its `epoch`.
        """
        order: np.ndarray = np.asarray(self._sampler.order(size, number))
        if not np.array_equal(np.sort(order), np.arange(size)):
            raise DataError(
                f"sampler {type(self._sampler).name!r} did not return a permutation of {size} rows for epoch {number}",
                hint="the sampler's order(size, epoch) must hold each of 0 … size − 1 once",
            )
        return order.astype(np.int64)


def _shares(weights: Sequence[float | None], sizes: np.ndarray) -> np.ndarray:
    """Return the number of an epoch's prompts from each dataset, int64 [datasets], at least 1; the largest remainders are rounded up."""
    total = int(sizes.sum())
    given = np.array(
        [w if w is not None else n for w, n in zip(weights, sizes, strict=True)], float
    )
    exact = given / given.sum() * total
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    for number in np.flatnonzero(counts == 0):
        counts[number] += 1
        counts[np.argmax(counts)] -= 1
    return counts
