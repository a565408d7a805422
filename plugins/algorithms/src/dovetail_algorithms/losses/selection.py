"""Selection of tokens from a mini-batch that is distributed over ranks; the result does not depend on the number of ranks.

T tokens of this rank, N samples of this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, UInt64

from dovetail.batch import Ragged
from dovetail.interfaces import Reduction

DIGIT_BITS = 16
"""Number of bits that `largest` adds to the smallest selected key with each sum over the ranks."""
DIGITS = 1 << DIGIT_BITS
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def largest(
    keys_T: UInt64[np.ndarray, "T"],
    candidates_T: Bool[np.ndarray, "T"],
    count: int,
    reduction: Reduction,
) -> Bool[np.ndarray, "T"]:
    """Return the mask of this rank's tokens, bool [T], that are among the `count` candidates with the largest keys over all ranks.

    The smallest selected key is found 16 bits at a time, from counts summed over ranks. All candidates with that key are selected. If
    there are at most `count` candidates, all are selected.

    Args:
        keys_T: the sort keys, uint64 [T].
        candidates_T: the mask of tokens to select from, bool [T].
        count: the number of tokens to select over all ranks; the same on every rank.
        reduction: computes sums over all ranks that hold tokens of the mini-batch.
    """
    total = int(reduction.sum(np.array([np.count_nonzero(candidates_T)], np.int64))[0])
    if count <= 0:
        return np.zeros_like(candidates_T)
    if total <= count:
        return candidates_T.copy()
    rest, wanted, threshold = keys_T[candidates_T], count, 0
    for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = ((rest >> np.uint64(shift)) & np.uint64(DIGITS - 1)).astype(np.int64)
        counts = reduction.sum(np.bincount(digits, minlength=DIGITS).astype(np.int64))
        at_least = counts[::-1].cumsum()[::-1]
        digit = int(np.flatnonzero(at_least >= wanted)[-1])
        wanted -= int(at_least[digit] - counts[digit])
        threshold |= digit << shift
        rest = rest[digits == digit]
    return candidates_T & (keys_T >= np.uint64(threshold))


def token_hashes(sample_ids: Sequence[str], rows: Ragged, seed: int) -> UInt64[np.ndarray, "T"]:
    """Return a hash of each token, uint64 [T], computed only from the seed, the sample's id and the token's position in the sample.

    Uses splitmix64 with the position as counter, seeded by a BLAKE2b digest of the id. The batch's other samples, their order and the
    ranks don't matter.

    Args:
        sample_ids: the N samples' ids, which are unique.
        rows: any column over the response tokens; only the number of tokens of each sample is read.
        seed: the run's seed.
    """
    seeds_N = np.array(
        [
            int.from_bytes(
                hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"
            )
            for name in sample_ids
        ],
        np.uint64,
    )
    position_T = np.arange(len(rows.values)) - np.repeat(rows.offsets[:-1], rows.lengths)
    state_T = (
        np.repeat(seeds_N, rows.lengths) + (position_T.astype(np.uint64) + np.uint64(1)) * GOLDEN
    )
    state_T = (state_T ^ (state_T >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_T = (state_T ^ (state_T >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state_T ^ (state_T >> np.uint64(31))


def ordered_keys(
    values_T: Float32[np.ndarray, "T"], ties_T: UInt64[np.ndarray, "T"]
) -> UInt64[np.ndarray, "T"]:
    """Return sort keys, uint64 [T], that rise with the value, and among equal values with the upper 32 bits of `ties_T`.

    Args:
        values_T: the values, float32 [T], without NaN.
        ties_T: numbers that break ties, uint64 [T].
    """
    # Adding 0 turns −0 into 0. The bit patterns of positive floats rise with the value, those of negative floats fall.
    bits_T = (values_T + np.float32(0)).view(np.uint32)
    negative_T = bits_T >> np.uint32(31) != 0
    rising_T = np.where(negative_T, ~bits_T, bits_T | np.uint32(1 << 31)).astype(np.uint64)
    return (rising_T << np.uint64(32)) | (ties_T >> np.uint64(32))


def share_of(tokens: int, share: float) -> int:
    """Return `share` times `tokens` as a number of tokens: rounded down, but at least one if the share is above 0."""
    return max(int(tokens * share), 1) if share > 0 and tokens else 0
