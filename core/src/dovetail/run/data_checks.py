"""Checks of data: compare what a dataset and a sampler give with their interfaces when it is first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.errors import DovetailError, PluginBrokenError
from dovetail.interfaces.data import DatasetSource, RowGroups, Sampler
from dovetail.plugins.titles import title_of


class CheckedDataset(DatasetSource):
    """A dataset that returns what another does, after a check against the interface.

    Args:
        source: the dataset to ask.
    """

    def __init__(self, source: DatasetSource) -> None:
        super().__init__(source.config, source.context)
        self._source = source

    def read(self, paths: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """The other's rows.

        Raises:
            PluginBrokenError: it raised something of its own, or returned no sequence of mappings; names it with its version.
            DataError: what the other finds wrong with the files.
        """
        title = title_of("dataset", self._source)
        try:
            rows = self._source.read(paths)
        except DovetailError:
            raise
        except Exception as error:
            raise PluginBrokenError(
                f"{title} raised {type(error).__name__}: {error}",
                hint="what is wrong with a file is a DataError that names it; DOVETAIL_TRACEBACK=1 shows the traceback",
            ) from error
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(
            rows, (str, bytes, Mapping)
        ):
            raise PluginBrokenError(
                f"{title}: read returned {type(rows).__name__}, not a sequence of rows",
                hint="return a list of mappings, or anything that has a length and rows by number",
            )
        if len(rows) and not isinstance(rows[0], Mapping):
            raise PluginBrokenError(
                f"{title}: the first row is of type {type(rows[0]).__name__}, not a mapping of columns",
                hint="a row is a mapping: {'prompt': …, 'reward_model': {'ground_truth': …}}",
            )
        return rows

    def stream(self, paths: Sequence[str]) -> RowGroups:
        """The other's groups, which are checked as their rows are read."""
        return self._source.stream(paths)


def check_sampler(sampler: Sampler, size: int) -> None:
    """Ask a sampler for its first epoch's order, twice.

    Args:
        sampler: of the run.
        size: prompts to train on.

    Raises:
        PluginBrokenError: it gives no permutation, or another one when it is asked again; names it with its version.
    """
    first, again = (np.asarray(sampler.order(size, 0)) for _ in range(2))
    title = title_of("sampler", sampler)
    if first.dtype.kind not in "iu" or not np.array_equal(np.sort(first), np.arange(size)):
        raise PluginBrokenError(
            f"{title} gave {first.dtype} {list(first.shape)}, no permutation of {size} rows",
            hint="its order(size, epoch) must hold each of 0 … size − 1 once",
        )
    if not np.array_equal(first, again):
        raise PluginBrokenError(
            f"{title} gave two different orders for one epoch: a resumed run would skip and repeat prompts",
            hint="its order(size, epoch) must follow from seed and epoch alone, without a state of its own",
        )
