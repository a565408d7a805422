"""The rule `streaming_unsound`, in runs without a correction, a clip or a bound of the weights."""

from __future__ import annotations

import pytest

from dovetail_sdk.testing import findings_of
from dovetail_trainers.preflight import streaming_unsound

SOUND = (
    (),
    ("trainer=streaming",),
    ("trainer={name: streaming, max_staleness: 0}", "algorithm.policy_loss=reinforce"),
    ("trainer=streaming", "algorithm.policy_loss=reinforce"),
    ("trainer=streaming", "algorithm.rollout_correction=null"),
    ("trainer={name: streaming, on_sync: abort}",),
    ("trainer={name: streaming, on_sync: keep}",),
    ("trainer={name: streaming, on_sync: abort, over_sampling: 1.5}",),
    ("trainer=streaming", "algorithm.rollout_correction=decoupled_geo_rs"),
)
WRONG = (
    (
        "trainer=streaming",
        "algorithm.rollout_correction=null",
        "algorithm.policy_loss=reinforce",
    ),
    ("trainer=streaming", "algorithm.rollout_correction.weight_upper=null"),
    ("trainer=streaming", "algorithm.rollout_correction.weights=null"),
    ("trainer=streaming", "actor.epochs=2", "algorithm.policy_loss.clip_high=20"),
    ("trainer={name: streaming, on_sync: abort}", "rollout.partial_rollout=false"),
    ("trainer={name: streaming, on_sync: abort}", "rollout.keep_cache=true"),
    ("trainer={name: streaming, on_sync: keep}", "rollout=sglang"),
    ("trainer={name: streaming, on_sync: drain, over_sampling: 1.5}",),
    (
        "trainer={name: streaming, max_staleness: 0, sync_every: 2}",
        "algorithm.rollout_correction=bypass_ppo_clip",
        "algorithm.policy_loss.clip_high=20",
    ),
)


@pytest.mark.parametrize("overrides", SOUND)
def test_samples_whose_ratio_is_bounded_are_left_alone(overrides) -> None:
    assert findings_of(streaming_unsound, *overrides) == []


@pytest.mark.parametrize("overrides", WRONG)
def test_what_bounds_no_ratio_is_found(overrides) -> None:
    assert findings_of(streaming_unsound, *overrides)
