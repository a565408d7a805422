"""Completions from a rollout's process keep every field, also if fields are missing or empty."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given, strategies as st

from dovetail.interfaces import Completion, FinishReason
from dovetail_runtime_ray.completions import pack

FLOATS = st.none() | st.lists(st.floats(-50, 0, width=32), max_size=6)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.lists(st.integers(0, 2**40), max_size=6))
    logs, raw = (draw(FLOATS) for _ in range(2))
    return Completion(
        request_id=draw(st.text(max_size=4)),
        sample=draw(st.integers(0, 1000)),
        response_ids=np.array(tokens, dtype=np.int64),
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        weight_versions=np.full(len(tokens), draw(st.integers(0, 9)), dtype=np.int64),
        log_probs=None if logs is None else np.array(logs, dtype=np.float32),
        raw_log_probs=None if raw is None else np.array(raw, dtype=np.float32),
    )


def equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


@given(st.lists(completions(), min_size=1, max_size=5))
def test_completions_come_out_as_they_went_in(given_C: list[Completion]) -> None:
    found_C = list(pickle.loads(pickle.dumps(pack(given_C))).unpack())
    assert len(found_C) == len(given_C)
    for sent, found in zip(given_C, found_C, strict=True):
        assert (sent.request_id, sent.sample, sent.finish_reason) == (
            found.request_id,
            found.sample,
            found.finish_reason,
        )
        for name in ("response_ids", "weight_versions", "log_probs", "raw_log_probs"):
            assert equal(getattr(sent, name), getattr(found, name)), name
