"""How many tokens of a response are the policy's own. T tokens, N samples."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from dovetail.batch import Ragged

WORD = 8
"""Bytes of a word: a mask is read a word at a time."""
ONES = np.uint64(0x0101010101010101)
"""Times a word of bytes 0 and 1, this has their sum in its highest byte."""
PART = 1 << 13
"""Words that are added up at once, in cache."""


def policy_lengths(mask: Ragged) -> Int64[np.ndarray, "N"]:
    """int64 [N]: tokens with mask 1 in each row of the ragged bool column."""
    bytes_T = np.ascontiguousarray(mask.values, np.bool_).view(np.uint8)
    whole = len(bytes_T) // WORD
    words = bytes_T[: whole * WORD].view("<u8")
    before = np.zeros(whole + 1, np.int64)
    for start in range(0, whole, PART):
        sums = before[start + 1 : min(start + PART, whole) + 1]
        np.cumsum(_sums(words[start : start + PART]), out=sums)
        sums += before[start]
    rest = np.zeros(WORD, np.uint8)
    rest[: len(bytes_T) % WORD] = bytes_T[whole * WORD :]

    word_N1, byte_N1 = np.divmod(mask.offsets, WORD)
    cut_N1 = np.full(len(word_N1), rest.view("<u8")[0])
    inside = word_N1 < whole
    cut_N1[inside] = words[word_N1[inside]]
    # The lower bytes of a word are its first.
    lower_N1 = (np.uint64(1) << (np.uint64(8) * byte_N1.astype(np.uint64))) - np.uint64(1)
    lengths_N: np.ndarray = np.diff(before[word_N1] + _sums(cut_N1 & lower_N1))
    return lengths_N


def _sums(words: np.ndarray) -> np.ndarray:
    """int64: sum of the bytes of each word, all of which are 0 or 1."""
    sums: np.ndarray = ((words * ONES) >> np.uint64(56)).astype(np.int64)
    return sums
