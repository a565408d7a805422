"""A set of integers, such as the indices of used prompts, as a short text: a bitmap, compressed, in Base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

import numpy as np


def pack(numbers: Iterable[int]) -> str:
    """Encode a set of integers ≥ 0 as text, of at most about max(numbers) / 6 characters."""
    index = np.fromiter(numbers, dtype=np.int64)
    bits = np.zeros(int(index.max()) + 1 if len(index) else 0, dtype=np.bool_)
    bits[index] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 6)).decode("ascii")


def unpack(text: str) -> set[int]:
    """Return the set of integers that `pack` encoded as this text."""
    data = zlib.decompress(base64.b64decode(text))
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8))).tolist())
