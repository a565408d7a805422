"""The samplers `shuffled` and `sequential`: the order of an epoch depends only on seed and epoch."""

from __future__ import annotations

import numpy as np

from dovetail.interfaces import Sampler
from dovetail_datasets.config import ShuffledConfig

_UINT64 = 2**64 - 1


class ShuffledSampler(Sampler):
    """Sampler that draws a new permutation every epoch.

    Sorts raw 64-bit draws of Philox (Salmon et al., SC 2011) under the key (seed, epoch): unlike
    NumPy's `permutation`, raw draws are the same in every version of NumPy.
    """

    name = "shuffled"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ShuffledConfig

    def order(self, size: int, epoch: int) -> np.ndarray:
        seed = self.context.seed if self.config.seed is None else self.config.seed
        key = np.array([seed & _UINT64, epoch & _UINT64], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(size)
        return np.argsort(draws, kind="stable").astype(np.int64)


class SequentialSampler(Sampler):
    """Sampler that takes rows in the order of the files, every epoch."""

    name = "sequential"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def order(self, size: int, epoch: int) -> np.ndarray:
        return np.arange(size, dtype=np.int64)
