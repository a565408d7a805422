"""A cache for scores of pure functions, keyed by the content of the arguments."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any

import numpy as np

from dovetail.interfaces import Outcome, Sample, Score
from dovetail_rollouts import RewardCall


class OutcomeCache:
    """A cache of the most recently used scores. Failures are not cached, nor are scores of arguments that JSON can't represent.

    Args:
        size: the maximum number of cached scores.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[bytes, Score] = OrderedDict()

    def key(self, call: RewardCall, sample: Sample) -> bytes | None:
        """Return the cache key of a function and the sample's arguments; None if the score can't be cached."""
        if not self._size or not call.pure:
            return None
        seen = {key: x for key, x in sample.arguments().items() if key in call.fields}
        try:
            text = json.dumps([call.name, seen], sort_keys=True, default=_plain)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def get(self, key: bytes | None) -> Score | None:
        """Return the score under this key, or None."""
        if key is None or key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: bytes | None, outcome: Outcome) -> None:
        """Store a score under its cache key. An outcome that is a failure is not stored, nor is a score without a key."""
        if key is None or not isinstance(outcome, Score):
            return
        self._kept[key] = outcome
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)


def _plain(value: object) -> Any:
    """Return the dtype and content of a NumPy array or scalar, as JSON values for the key.

    Raises:
        TypeError: the value is of another type. Its repr can't be used instead, since different objects may have equal reprs.
    """
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), value.tolist()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.item()]
    raise TypeError(
        f"a value of type {type(value).__name__} can't be compared by content; expected a NumPy array or scalar"
    )
