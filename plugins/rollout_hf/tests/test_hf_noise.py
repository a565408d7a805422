"""Sampling noise: standard exponential, a pure function of key, offset and index, free of visible structure."""

from __future__ import annotations

import numpy as np
import torch

from dovetail.random_streams import SampleStream
from dovetail_rollout_hf.noise import log_exponential, stream_seeds, vocabulary_counters

CPU = torch.device("cpu")


def noise(samples: int, offsets: int, vocabulary: int, **stream) -> np.ndarray:
    """Exponential noise [samples, offsets, vocabulary]."""
    keys = torch.tensor([SampleStream(seed=1, sample=i, **stream).key() for i in range(samples)])
    low, high = stream_seeds(keys, torch.arange(offsets).expand(samples, -1))
    rows = log_exponential(
        low.reshape(-1, 1), high.reshape(-1, 1), vocabulary_counters(vocabulary, CPU)
    )
    return rows.exp().double().numpy().reshape(samples, offsets, vocabulary)


def test_it_is_standard_exponential() -> None:
    values = np.sort(noise(50, 40, 100).ravel())
    expected = 1 - np.exp(-values)
    distance = np.abs(expected - (np.arange(len(values)) + 0.5) / len(values)).max()
    # The bound of the Kolmogorov-Smirnov test at a significance of 1 in 10,000.
    assert distance < 2.23 / np.sqrt(len(values))
    assert np.isfinite(np.log(values)).all()


def test_neighbouring_offsets_tokens_and_samples_are_independent() -> None:
    values = noise(30, 30, 300)
    uniform = 1 - np.exp(-values) - 0.5
    bound = 4.5 / np.sqrt(uniform.size) / 12  # 4.5 standard errors of a covariance of uniforms
    for dim in range(3):
        for lag in (1, 2, 7):
            a = np.take(uniform, range(uniform.shape[dim] - lag), dim)
            b = np.take(uniform, range(lag, uniform.shape[dim]), dim)
            assert abs((a * b).mean()) < bound * 1.2, (dim, lag)


def test_a_row_depends_on_its_own_key_and_offset_alone() -> None:
    keys = torch.tensor([SampleStream(seed=1, sample=i).key() for i in range(4)])
    offsets = torch.tensor([[0, 1, 2], [5, 6, 7], [0, 9, 1], [2**40, 3, 3]])
    low, high = stream_seeds(keys, offsets)
    for row in range(4):
        for column in range(3):
            alone = stream_seeds(keys[row : row + 1], offsets[row : row + 1, column : column + 1])
            assert (alone[0].item(), alone[1].item()) == (
                low[row, column].item(),
                high[row, column].item(),
            )
    assert low[3, 1] == low[3, 2]


def test_the_bits_are_those_of_plain_integers() -> None:
    """The same on every machine and in every version: a resumed run must go on as it began."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    def bits(low: int, high: int, token: int) -> int:
        x = (token * 0x9E3779B1 + low) % 2**32
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32 ^ high
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return (x ^ (x >> 16)) >> 1

    keys, offsets = [(1, 2), (-3, 4)], [[0, 1], [2, 2**40]]
    low, high = stream_seeds(torch.tensor(keys), torch.tensor(offsets))
    for row, (first, second) in enumerate(keys):
        for column, offset in enumerate(offsets[row]):
            seed = mix(mix((offset * 0x9E3779B97F4A7C15 + first) % 2**64) ^ second % 2**64)
            assert int(low[row, column]) % 2**32 == seed % 2**32
            assert int(high[row, column]) % 2**32 == seed >> 32
            at = (slice(row, row + 1), slice(column, column + 1))
            ours = log_exponential(low[at], high[at], vocabulary_counters(50, CPU))[0].double()
            uniform = [(bits(seed % 2**32, seed >> 32, v) + 0.5) / 2**31 for v in range(50)]
            plain = np.log(-np.log1p(-np.array(uniform)))
            np.testing.assert_allclose(ours.numpy(), plain, rtol=1e-5, atol=1e-5)


def test_extreme_seeds_give_finite_noise() -> None:
    extremes = torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32).unsqueeze(1)
    values = log_exponential(extremes, extremes.flip(0), vocabulary_counters(100_000, CPU))
    assert values.isfinite().all()
    assert values.min() > -22.3
    assert values.max() < 2.9
