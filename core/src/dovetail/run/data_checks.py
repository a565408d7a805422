"""Check of a sampler against its interface, before first use."""

from __future__ import annotations

import numpy as np

from dovetail.errors import PluginBrokenError
from dovetail.interfaces.data import Sampler
from dovetail.plugins.titles import title_of


def check_sampler(sampler: Sampler, size: int) -> None:
    """Check that a sampler gives a permutation for the first epoch, and the same one twice.

    Args:
        sampler: the sampler of the run.
        size: the number of training prompts.

    Raises:
        PluginBrokenError: the order is not a permutation, or differs between two calls; the error names the sampler and its version.
    """
    first, again = (np.asarray(sampler.order(size, 0)) for _ in range(2))
    title = title_of("sampler", sampler)
    if first.dtype.kind not in "iu" or not np.array_equal(np.sort(first), np.arange(size)):
        raise PluginBrokenError(
            f"{title} returned {first.dtype} {list(first.shape)}, which is not a permutation of {size} rows",
            hint="the sampler's order(size, epoch) must hold each of 0 … size − 1 once",
        )
    if not np.array_equal(first, again):
        raise PluginBrokenError(
            f"{title} returned two different orders for one epoch: a resumed run would skip and repeat prompts",
            hint="the sampler's order(size, epoch) must depend on the seed and the epoch alone, not on a state of its own",
        )
