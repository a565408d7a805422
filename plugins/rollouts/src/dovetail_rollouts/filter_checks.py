"""A sample filter's choice, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.batch import Batch
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Groups
from dovetail.plugins import called, title_of

if TYPE_CHECKING:
    from jaxtyping import Bool

    from dovetail.interfaces import SampleFilter


def checked_keep(chosen: SampleFilter, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
    """Return the filter's answer, bool [N].

    Raises:
        PluginBrokenError: it raised, or returned something else; names the plugin, its file and line.
    """
    name = title_of("sample_filter", chosen)
    result = called(lambda: name, chosen.keep, columns, groups)
    if (
        not isinstance(result, np.ndarray)
        or result.dtype != np.bool_
        or result.shape != (len(columns),)
    ):
        found = (
            f"{result.dtype} of shape {result.shape}"
            if isinstance(result, np.ndarray)
            else type(result).__name__
        )
        raise PluginBrokenError(
            f"{name} returned {found} for {len(columns)} samples",
            hint="`keep` returns a NumPy array of bool, one a sample",
        )
    return result
