"""The scans of `scans` in NumPy: blocks of samples that stay in cache, and in each a recurrence over rows of 64.

Legend: T tokens, K policy tokens of a block, N samples, R rows.
"""

from __future__ import annotations

import threading

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dovetail_algorithms.estimators.parts import in_parts, in_threads

BLOCK = 1 << 17
"""Tokens of a block: some arrays of them fit a core's own cache."""
ROW = 64
"""Tokens of a row: enough to leave few rows, and few enough for their powers of a discount."""
SHORT_ROW = 16
"""Values of a row in a recurrence step by step."""
SHORT = 256
"""A recurrence of this length is quicker as a loop."""
LEAST_DECAY = 1e-3
"""Powers of less are too small to divide by."""


def gae(
    rewards_T: Float32[np.ndarray, "T"],
    values_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
    lam: float,
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """As `scans.gae`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    rooms = Rooms(offsets_N1)

    def work(low: int, high: int) -> None:
        tokens, kept, ends_1 = own_tokens(mask_T, offsets_N1, low, high)
        last_K = ends_1[1:][ends_1[1:] > ends_1[:-1]] - 1
        values_K = values_T[tokens] if kept is None else values_T[tokens][kept]
        sums_K = rooms.get("sums", len(values_K))
        np.multiply(values_K[1:], gamma, out=sums_K[:-1])
        sums_K[last_K] = 0
        sums_K -= values_K
        sums_K += rewards_T[tokens] if kept is None else rewards_T[tokens][kept]
        backward(sums_K, last_K, gamma * lam, rooms.get("spare", len(sums_K)))
        put(sums_K, tokens, kept, advantages_T)
        sums_K += values_K
        put(sums_K, tokens, kept, returns_T)

    in_parts(offsets_N1, BLOCK, work)
    return advantages_T, returns_T


def discounted_returns(
    rewards_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
) -> Float32[np.ndarray, "T"]:
    """As `scans.discounted_returns`."""
    returns_T = np.empty(len(mask_T), np.float32)
    rooms = Rooms(offsets_N1)

    def work(low: int, high: int) -> None:
        tokens, kept, ends_1 = own_tokens(mask_T, offsets_N1, low, high)
        last_K = ends_1[1:][ends_1[1:] > ends_1[:-1]] - 1
        sums_K = rooms.floats(rewards_T[tokens], kept, "sums")
        backward(sums_K, last_K, gamma, rooms.get("spare", len(sums_K)))
        put(sums_K, tokens, kept, returns_T)

    in_parts(offsets_N1, BLOCK, work)
    return returns_T


def rewards_to_go(
    rewards_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    baseline_N: Float32[np.ndarray, "N"],
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """As `scans.rewards_to_go`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    rooms = Rooms(offsets_N1)

    def work(low: int, high: int) -> None:
        tokens, kept, ends_1 = own_tokens(mask_T, offsets_N1, low, high)
        last_K = ends_1[1:][ends_1[1:] > ends_1[:-1]] - 1
        sums_K = rooms.floats(rewards_T[tokens], kept, "sums")
        backward(sums_K, last_K, 1.0, rooms.get("spare", len(sums_K)))
        put(sums_K, tokens, kept, returns_T)
        sums_K -= np.repeat(baseline_N[low:high], np.diff(ends_1))
        put(sums_K, tokens, kept, advantages_T)

    in_parts(offsets_N1, BLOCK, work)
    return advantages_T, returns_T


def moments(
    values_T: Float32[np.ndarray, "T"], mask_T: Bool[np.ndarray, "T"]
) -> Float64[np.ndarray, "parts 3"]:
    """As `scans_compiled.moments`."""
    starts = range(0, len(mask_T), BLOCK)
    parts = np.zeros((len(starts), 3))
    rooms = Rooms(np.zeros(1, np.int64))

    def work(part: int) -> None:
        block = slice(starts[part], starts[part] + BLOCK)
        mask = mask_T[block]
        chosen = rooms.floats(values_T[block], None if mask.all() else mask, "values")
        if len(chosen):
            mean = chosen.mean()
            chosen -= mean
            parts[part] = len(chosen), mean, np.square(chosen, out=chosen).sum()

    in_threads(len(starts), work)
    return parts


def standardise(
    values_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    mean: float,
    factor: float,
    out_T: Float32[np.ndarray, "T"],
) -> None:
    """As `scans_compiled.standardise`."""
    starts = range(0, len(mask_T), BLOCK)

    def work(part: int) -> None:
        block = slice(starts[part], starts[part] + BLOCK)
        mask, out = mask_T[block], out_T[block]
        np.subtract(values_T[block], np.float32(mean), out=out)
        out *= np.float32(factor)
        if not mask.all():
            out *= mask

    in_threads(len(starts), work)


class Rooms(threading.local):
    """Arrays that hold any block, by name, for each thread: fresh memory costs more than what is done in it."""

    def __init__(self, offsets_N1: np.ndarray) -> None:
        self._size = max(BLOCK, int(np.diff(offsets_N1).max(initial=0)))
        self._rooms: dict[str, np.ndarray] = {}

    def get(self, name: str, count: int) -> Float64[np.ndarray, "count"]:
        """The first `count` values of the room, which hold anything."""
        if name not in self._rooms:
            self._rooms[name] = np.empty(self._size)
        return self._rooms[name][:count]

    def floats(self, values: np.ndarray, kept: np.ndarray | None, name: str) -> np.ndarray:
        """The kept values of a block as float64, in a room of that name."""
        chosen = values if kept is None else values[kept]
        out = self.get(name, len(chosen))
        out[:] = chosen
        return out


def own_tokens(
    mask_T: Bool[np.ndarray, "T"], offsets_N1: Int64[np.ndarray, "N1"], low: int, high: int
) -> tuple[slice, np.ndarray | None, np.ndarray]:
    """The policy's tokens in samples low … high − 1.

    Returns:
        The samples' tokens; their mask, or None where it is True throughout; and int64 [samples + 1], where
        among the K kept tokens each sample begins, and the last ends.
    """
    tokens = slice(int(offsets_N1[low]), int(offsets_N1[high]))
    ends = offsets_N1[low : high + 1] - tokens.start
    mask = mask_T[tokens]
    if mask.all():
        return tokens, None, ends
    return tokens, mask, np.searchsorted(np.flatnonzero(mask), ends)


def backward(
    sums_K: Float64[np.ndarray, "K"], last_K: np.ndarray, decay: float, spare: np.ndarray
) -> None:
    """In place S_k = x_k + decay · S_{k+1} within each sample.

    Rows of `ROW` tokens are summed each from 0, in closed form; then the sums that follow each row are known by
    the recurrence over the rows' first tokens. Rows in which a sample ends are done step by step.

    Args:
        sums_K: float64 [K], x; becomes S.
        last_K: int64, the last token of each sample, which nothing follows.
        decay: in [0, 1].
        spare: float64 [at least K], overwritten.
    """
    whole = len(sums_K) // ROW * ROW
    if decay < LEAST_DECAY or not whole:
        factors_K = np.full(len(sums_K), decay)
        factors_K[last_K] = 0
        _recur(sums_K, factors_K)
        return
    rows_RC = sums_K[:whole].reshape(-1, ROW)
    tail_K = sums_K[whole:]
    if len(tail_K):
        factors_K = np.full(len(tail_K), decay)
        factors_K[last_K[last_K >= whole] - whole] = 0
        _recur(tail_K, factors_K)
    last_K = last_K[last_K < whole]
    ending = np.unique(last_K // ROW)
    ending_CE = np.ascontiguousarray(rows_RC[ending].T)
    factor_CE = np.full_like(ending_CE, decay)
    factor_CE[last_K % ROW, np.searchsorted(ending, last_K // ROW)] = 0
    _recur_columns(ending_CE, factor_CE)

    powers_C = decay ** np.arange(ROW)
    if decay != 1:
        rows_RC *= powers_C
    np.add.accumulate(rows_RC[:, ::-1], axis=1, out=rows_RC[:, ::-1])
    if decay != 1:
        rows_RC *= 1 / powers_C
    rows_RC[ending] = ending_CE.T

    # The sum at each row's first token, and with it what follows every row.
    factor_R = np.full(len(rows_RC), decay**ROW)
    factor_R[ending] = factor_CE[0]
    sums_R = np.append(rows_RC[:, 0], tail_K[:1])
    _recur(sums_R, np.append(factor_R, np.zeros(len(sums_R) - len(factor_R))))
    later_R = np.append(sums_R[1:], 0.0)[: len(rows_RC)]
    later_E = later_R[ending]
    later_R[ending] = 0
    spare_RC = spare[:whole].reshape(-1, ROW)
    rows_RC += np.multiply(later_R[:, None], decay * powers_C[::-1], out=spare_RC)
    factor_CE *= later_E
    rows_RC[ending] += factor_CE.T


def _recur(x_K: np.ndarray, factor_K: np.ndarray) -> None:
    """In place x_k += factor_k · x_{k+1}, from the end; the last factor is not used.

    Rows side by side, each from 0; then what follows each row is known by the same recurrence over the
    rows' first values, and is added with the product of the factors in between.
    """
    count = len(x_K)
    if count <= SHORT:
        later = 0.0
        values, factors = x_K.tolist(), factor_K.tolist()
        for k in range(count - 1, -1, -1):
            later = values[k] + factors[k] * later
            values[k] = later
        x_K[:] = values
        return
    whole = count // SHORT_ROW * SHORT_ROW
    if whole < count:
        _recur(x_K[whole:], factor_K[whole:])
    x_CR = np.ascontiguousarray(x_K[:whole].reshape(-1, SHORT_ROW).T)
    factor_CR = np.ascontiguousarray(factor_K[:whole].reshape(-1, SHORT_ROW).T)
    _recur_columns(x_CR, factor_CR)
    first_R = np.append(x_CR[0], x_K[whole : whole + 1])
    _recur(first_R, np.append(factor_CR[0], np.zeros(len(first_R) - len(x_CR[0]))))
    factor_CR *= np.append(first_R[1:], 0.0)[: len(x_CR[0])]
    x_CR += factor_CR
    x_K[:whole].reshape(-1, SHORT_ROW)[:] = x_CR.T


def _recur_columns(x_CR: np.ndarray, factor_CR: np.ndarray) -> None:
    """In place x_c += factor_c · x_{c+1} in every row, from 0; the factors become their products to the row's end."""
    product_R = np.empty(x_CR.shape[1])
    for column in range(len(x_CR) - 2, -1, -1):
        np.multiply(factor_CR[column], x_CR[column + 1], out=product_R)
        x_CR[column] += product_R
        factor_CR[column] *= factor_CR[column + 1]


def put(values_K: np.ndarray, tokens: slice, kept: np.ndarray | None, out_T: np.ndarray) -> None:
    """Write the kept values of a block where they belong, and 0 between them."""
    if kept is None:
        out_T[tokens] = values_K
    else:
        out_T[tokens] = 0
        out_T[tokens][kept] = values_K
