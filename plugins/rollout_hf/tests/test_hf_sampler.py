"""The sampler draws from softmax(logits / temperature) restricted by top-k and top-p, and reports the probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from dovetail.interfaces import SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_rollout_hf.noise import stream_seeds
from dovetail_rollout_hf.sampler import TokenSampler

CPU = torch.device("cpu")
SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
]


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **kwargs)


def oracle(logits: np.ndarray, temperature=1.0, top_k=-1, top_p=1.0) -> np.ndarray:
    """Probabilities [V], plainly."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = len(p) if top_k < 1 else min(top_k, len(p))
    q = p[order[:keep]] / p[order[:keep]].sum()
    if top_p < 1:
        keep = 1 + int((np.cumsum(q)[:-1] < top_p).sum())
    result = np.zeros_like(p)
    result[order[:keep]] = p[order[:keep]] / p[order[:keep]].sum()
    return result


def seeds(rows: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([SampleStream(seed=7, sample=i).key() for i in range(rows)])
    return stream_seeds(keys, torch.full((rows, 1), offset))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_frequencies_match_the_probabilities(setting) -> None:
    """Chi-square on 20,000 draws over 12 tokens; fails by chance less than once in 10,000."""
    rows, chi_square_bound = 20_000, 40.0
    logits = np.random.default_rng(0).normal(size=12) * 1.5
    expected = oracle(logits, **setting) * rows
    draw = TokenSampler([params(**setting)] * rows, CPU).draw(
        torch.from_numpy(logits).float().expand(rows, -1), *seeds(rows)
    )
    counts = np.bincount(draw.tokens_N.numpy(), minlength=12)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < chi_square_bound


@given(
    # Integers, divided by 100: different logits differ by more than rounding, so that their order is certain.
    logits=arrays(np.int64, 9, elements=st.integers(-800, 800), unique=True),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 2, 5, 9, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1]),
)
def test_log_probs_are_those_of_the_sampler_as_used(logits, temperature, top_k, top_p) -> None:
    logits = (logits / 100).astype(np.float32)
    setting = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    rows = 8
    draw = TokenSampler([params(log_probs=True, raw_log_probs=True, **setting)] * rows, CPU).draw(
        torch.from_numpy(logits).expand(rows, -1), *seeds(rows)
    )
    tokens = draw.tokens_N.numpy()
    used = oracle(logits.astype(np.float64), **setting)[tokens]
    raw = oracle(logits.astype(np.float64), temperature)[tokens]
    # Leave out cases in which rounding decides whether a token is in the nucleus.
    mass = np.sort(oracle(logits.astype(np.float64), temperature, top_k))[::-1].cumsum()
    if top_p < 1 and np.abs(mass - top_p).min() < 1e-5:
        return
    np.testing.assert_allclose(draw.log_probs_N.numpy(), np.log(used), atol=2e-5)
    np.testing.assert_allclose(draw.raw_log_probs_N.numpy(), np.log(raw), atol=2e-5)


def test_greedy_takes_the_most_likely_token_with_certainty() -> None:
    logits = torch.randn(5, 30, generator=torch.manual_seed(0))
    row = params(temperature=0.0, log_probs=True, raw_log_probs=True, top_k=3)
    draw = TokenSampler([row] * 5, CPU).draw(logits, *seeds(5))
    assert torch.equal(draw.tokens_N, logits.argmax(-1))
    assert draw.log_probs_N.tolist() == [0.0] * 5
    torch.testing.assert_close(draw.raw_log_probs_N, logits.log_softmax(-1).max(-1).values)


def test_every_row_keeps_its_own_settings_in_a_mixed_batch() -> None:
    rows = [params(log_probs=True, **s) for s in SETTINGS] + [params(temperature=0.0)]
    logits = torch.randn(len(rows), 40, generator=torch.manual_seed(1))
    low, high = seeds(len(rows))
    together = TokenSampler(rows, CPU).draw(logits, low, high)
    for i, row in enumerate(rows):
        alone = TokenSampler([row], CPU).draw(logits[i : i + 1], low[i : i + 1], high[i : i + 1])
        assert together.tokens_N[i] == alone.tokens_N[0]
        if row.log_probs:
            torch.testing.assert_close(together.log_probs_N[i], alone.log_probs_N[0])


def test_nothing_is_computed_that_was_not_asked_for() -> None:
    draw = TokenSampler([params()] * 2, CPU).draw(torch.randn(2, 5), *seeds(2))
    assert draw.log_probs_N is None
    assert draw.raw_log_probs_N is None
