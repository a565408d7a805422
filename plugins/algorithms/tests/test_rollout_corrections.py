"""Every preset of the rollout correction: its settings, the columns it requires, its effect on a batch, and the conformance suite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.config.docs import field_docs
from dovetail.interfaces import Correction, CorrectionInputs, LocalReduction, PluginContext
from dovetail.metrics import values
from dovetail.plugins.index import default_index
from dovetail_algorithms.config import corrections as configs
from dovetail_algorithms.config.corrections import (
    CONFIGS,
    RejectionSection,
    RolloutCorrectionConfig,
)
from dovetail_algorithms.corrections import CORRECTIONS
from dovetail_sdk.testing.conformance import RolloutCorrectionConformance
from dovetail_sdk.testing.shapes import checked
from dovetail_stages.numerics.rollout_correction import correct_batch


@pytest.fixture(scope="module", autouse=True)
def correction_shapes():
    with checked(Correction, CorrectionInputs):
        yield


GEO, K3, SEQ = ("seq_mean_k1", 0.999, 1.001), ("seq_mean_k3", None, 0.01), ("seq_sum_k1", 0.5, 2.0)
TIS, ICEPOP = (None, 2.0, "truncate"), (0.5, 5.0, "zero")

# From verl's list of presets: mode, weights, bounds of the weights, rejection criteria.
PRESETS = {
    "decoupled_token_is": ("decoupled", "token", TIS, []),
    "decoupled_seq_is": ("decoupled", "sequence", TIS, []),
    "decoupled_token_icepop": ("decoupled", "token", ICEPOP, []),
    "decoupled_seq_is_rs": ("decoupled", "sequence", TIS, [SEQ]),
    "decoupled_geo_rs": ("decoupled", None, TIS, [GEO]),
    "decoupled_geo_rs_token_tis": ("decoupled", "token", TIS, [GEO]),
    "decoupled_geo_rs_seq_tis": ("decoupled", "sequence", TIS, [GEO]),
    "decoupled_k3_rs": ("decoupled", None, TIS, [K3]),
    "decoupled_k3_rs_token_tis": ("decoupled", "token", TIS, [K3]),
    "decoupled_k3_rs_seq_tis": ("decoupled", "sequence", TIS, [K3]),
    "bypass_ppo_clip": ("bypass", None, TIS, []),
    "bypass_ppo_clip_geo_rs": ("bypass", None, TIS, [GEO]),
    "bypass_ppo_clip_k3_rs": ("bypass", None, TIS, [K3]),
    "bypass_pg_is": ("bypass", "sequence", TIS, []),
    "bypass_pg_token_icepop": ("bypass", "token", ICEPOP, []),
    "bypass_pg_geo_rs": ("bypass", None, TIS, [GEO]),
    "bypass_pg_geo_rs_token_tis": ("bypass", "token", TIS, [GEO]),
    "bypass_pg_geo_rs_seq_tis": ("bypass", "sequence", TIS, [GEO]),
    "disabled": ("disabled", None, TIS, []),
}


def make(cls, **settings):
    return cls(cls.Config(name=cls.name, **settings), PluginContext())


def batch(log_ratios, *, mask=None, **columns):
    """Return a batch with one list of log r per sample; the old policy's log-probabilities are −1 nat."""
    rows = Ragged.from_list(log_ratios, dtype=np.float32)
    old = np.full(len(rows.values), -1.0, np.float32)
    given = {
        "sample_id": [f"s{i}" for i in range(len(rows))],
        "response_mask": rows.with_values(np.ones(len(old), np.bool_))
        if mask is None
        else Ragged.from_list(mask, dtype=np.bool_),
        "old_log_probs": rows.with_values(old),
        "rollout_log_probs": rows.with_values(old - rows.values),
    }
    return Batch(given | columns)


# -- the presets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_installed_with_the_settings_of_its_name(name):
    mode, weights, bounds, reject = PRESETS[name]
    entry = next(e for e in default_index().entries("rollout_correction") if e.name == name)
    assert entry.state == "compatible"
    cls = CORRECTIONS[name]
    assert entry.target == f"{cls.__module__}:{cls.__name__}"
    config = cls.Config()
    assert (config.mode, config.weights, config.normalize_weights) == (mode, weights, False)
    assert (config.weight_lower, config.weight_upper, config.weight_outside) == bounds
    assert [(r.by, r.lower, r.upper) for r in config.reject] == reject


def test_there_are_no_other_presets():
    ours = [
        e.name
        for e in default_index().entries("rollout_correction")
        if e.distribution == "dovetail-algorithms"
    ]
    assert sorted(ours) == sorted(PRESETS)
    assert set(CORRECTIONS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_each_setting_of_a_preset_can_be_overridden_and_is_documented(name):
    own = CORRECTIONS[name].Config
    config = own(
        mode="decoupled",
        weights="token",
        weight_upper=5.0,
        weight_lower=0.1,
        weight_outside="zero",
        normalize_weights=True,
        reject=(RejectionSection(by="token_k2", upper=3.0),),
    )
    assert config.weight_upper == 5.0
    assert config.reject[0].by == "token_k2"
    assert set(field_docs(own)) >= set(field_docs(RolloutCorrectionConfig))
    with pytest.raises(ValueError, match="weight_upper"):
        own(weight_upper=0.5)
    with pytest.raises(ValueError, match="weight_lower"):
        own(weight_lower=1.5)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_asks_for_what_it_reads_and_says_what_it_makes(name):
    mode, weights, _, reject = PRESETS[name]
    cls = CORRECTIONS[name]
    config = cls.Config()
    assert cls.mode(config) == mode
    assert cls.requires(config) == (set() if mode == "disabled" else {"rollout_log_probs"})
    assert cls.before_update(config) == (mode == "decoupled" and bool(reject))
    made = {"rollout_is_weights"} if weights else set()
    made |= {"loss_mask"} if reject else set()
    assert cls.provides(config) == (made if mode == "decoupled" else set())


def test_normalising_needs_the_whole_batch():
    config = CONFIGS["decoupled_token_is"](normalize_weights=True)
    assert CORRECTIONS["decoupled_token_is"].before_update(config)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: CONFIGS["decoupled_token_is"](weights=None, normalize_weights=True),
            "`weights` is null",
        ),
        (
            lambda: CONFIGS["decoupled_token_is"](mode="bypass", normalize_weights=True),
            "micro-batch",
        ),
        (lambda: RejectionSection(by="token_k3", lower=0.5, upper=2.0), "never negative"),
        (lambda: RejectionSection(by="token_k1", upper=0.9), "upper=0.9"),
        (lambda: RejectionSection(by="token_k1", lower=1.1, upper=2.0), "lower=1.1"),
        (lambda: RejectionSection(by="token_k2", upper=0.0), "upper"),
    ],
)
def test_settings_that_make_no_sense_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_the_criteria_of_the_config_are_those_of_the_numerics():
    from typing import get_args

    from dovetail_stages.numerics.rollout_correction import CRITERIA

    assert get_args(configs.CriterionName) == CRITERIA


# -- effects on a batch ------------------------------------------------------------------------------


def weights(name, log_ratios, **settings):
    corrected, _ = correct_batch(make(CORRECTIONS[name], **settings), batch(log_ratios))
    return corrected["rollout_is_weights"].to_list()


def test_token_weights_are_ratios_truncated_above():
    got = weights("decoupled_token_is", [[0.0, math.log(1.5), math.log(4.0), math.log(0.1)]])
    assert got[0] == pytest.approx([1.0, 1.5, 2.0, 0.1], rel=1e-5)
    got = weights("decoupled_token_is", [[math.log(4.0), math.log(7.0)]], weight_upper=5.0)
    assert got[0] == pytest.approx([4.0, 5.0], rel=1e-5)


def test_sequence_weights_are_products_over_the_sample():
    got = weights("decoupled_seq_is", [[math.log(1.5), math.log(0.5)], [math.log(3.0)], []])
    assert got[0] == pytest.approx([0.75, 0.75], rel=1e-5)
    assert got[1] == pytest.approx([2.0], rel=1e-5)
    assert got[2] == []


def test_icepop_zeroes_on_both_sides():
    ratios = [0.4, 0.6, 4.9, 5.1]
    got = weights("decoupled_token_icepop", [[math.log(r) for r in ratios]])
    assert got[0] == pytest.approx([0.0, 0.6, 4.9, 0.0], rel=1e-5)


def test_normalised_weights_have_mean_one_over_the_tokens_that_are_kept():
    done, metrics = correct_batch(
        make(
            CORRECTIONS["decoupled_token_is"],
            normalize_weights=True,
            reject=(RejectionSection(by="token_k1", upper=3.0),),
        ),
        batch([[0.0, math.log(2.0)], [math.log(9.0), math.log(0.5)]]),
    )
    assert done["loss_mask"].to_list() == [[True, True], [False, True]]
    flat = done["rollout_is_weights"].values
    assert flat[[0, 1, 3]].mean() == pytest.approx(1.0)
    assert flat.tolist() == pytest.approx([6 / 7, 12 / 7, 0.0, 3 / 7], rel=1e-5)
    assert metrics["rollout_corr/weight_mean"].value == pytest.approx(1.0)


def test_rejection_makes_a_loss_mask_and_counts():
    far, near = [0.01, 0.02, 0.0], [0.0005, -0.0005, 0.0002]
    done, metrics = correct_batch(make(CORRECTIONS["decoupled_geo_rs"]), batch([far, near, []]))
    assert "rollout_is_weights" not in done
    assert done["loss_mask"].to_list() == [[False] * 3, [True] * 3, []]
    got = values(metrics)
    assert got["rollout_corr/masked_token"] == pytest.approx(0.5)
    assert got["rollout_corr/masked_seq"] == pytest.approx(0.5)
    assert got["rollout_corr/masked_token/seq_mean_k1"] == pytest.approx(0.5)


def test_without_a_rejected_token_the_loss_mask_is_the_response_mask():
    given = batch([[0.0, 0.0]])
    done, _ = correct_batch(make(CORRECTIONS["decoupled_geo_rs"]), given)
    assert done["loss_mask"].to_list() == given["response_mask"].to_list()


def test_a_loss_mask_that_is_there_is_narrowed_and_its_tokens_count_in_nothing():
    there = Ragged.from_list([[True, False], [False, False]], dtype=np.bool_)
    # The second token is masked, else its ratio would reject the first sample. The second sample is masked entirely.
    given = batch([[0.0, 9.0], [9.0, 9.0]], loss_mask=there)
    done, metrics = correct_batch(make(CORRECTIONS["decoupled_geo_rs_seq_tis"]), given)
    assert done["loss_mask"].to_list() == [[True, False], [False, False]]
    assert done["rollout_is_weights"].to_list() == [[1.0, 0.0], [0.0, 0.0]]
    assert values(metrics)["rollout_corr/masked_token"] == 0.0


def test_criteria_combine_with_and():
    cls = make(
        CORRECTIONS["decoupled_token_is"],
        weights=None,
        reject=(
            RejectionSection(by="token_k1", lower=0.5, upper=2.0),
            RejectionSection(by="seq_max_k2", upper=2.0),
        ),
    )
    # log r = 1 is outside the token's bounds 0.5 to 2.0, so that token is rejected. log r = 2.5 has k2 = 3.1, which rejects its sample.
    done, _ = correct_batch(cls, batch([[0.1, 1.0, 0.1], [0.1, 2.5], [0.6, -0.6]]))
    assert done["loss_mask"].to_list() == [[True, False, True], [False, False], [True, True]]


def test_disabled_does_nothing_at_all():
    given = batch([[3.0, 1.0]])
    done, metrics = correct_batch(make(CORRECTIONS["disabled"]), given)
    assert done.equals(given)
    assert not metrics


def test_bypass_corrects_micro_batches_by_the_current_policy():
    done = make(CORRECTIONS["bypass_pg_geo_rs_token_tis"]).correct(
        _inputs([0.5, 0.0, 0.0002], [0, 1, 3]), LocalReduction()
    )
    assert done.keep_T.tolist() == [False, True, True]
    assert done.weights_T.tolist() == pytest.approx([0.0, 1.0, 1.0002], rel=1e-5)


def _inputs(log_ratios, offsets):
    train = torch.full((len(log_ratios),), -1.0)
    return CorrectionInputs(
        train_log_probs_T=train,
        rollout_log_probs_T=train - torch.tensor(log_ratios),
        mask_T=torch.ones(len(log_ratios), dtype=torch.bool),
        offsets_N1=torch.tensor(offsets),
    )


# -- the conformance suite, for every preset and for settings that no preset has --------------------------


class _Suite(RolloutCorrectionConformance):
    __test__ = False


_APART = (
    "decoupled_token_is", "decoupled_seq_is_rs", "decoupled_k3_rs_seq_tis", "decoupled_geo_rs",
    "bypass_ppo_clip", "bypass_pg_token_icepop", "bypass_pg_geo_rs_seq_tis", "disabled",
)  # fmt: skip
"""Presets that together cover each mode, level of weights and criterion; the suites of the other presets run nightly."""

for _name, _cls in CORRECTIONS.items():
    globals()[f"Test{_cls.__name__}"] = type(
        f"Test{_cls.__name__}",
        (_Suite,),
        {
            "plugin": _cls,
            "__test__": True,
            "__module__": __name__,
            "pytestmark": [] if _name in _APART else [pytest.mark.nightly],
        },
    )


class TestNormalisedTokens(RolloutCorrectionConformance):
    plugin = CORRECTIONS["decoupled_token_is"]
    config = CONFIGS["decoupled_token_is"](name="decoupled_token_is", normalize_weights=True)
    batch_wide = True


class TestEveryLevelAtOnce(RolloutCorrectionConformance):
    plugin = CORRECTIONS["decoupled_seq_is"]
    config = CONFIGS["decoupled_seq_is"](
        name="decoupled_seq_is",
        weight_upper=None,
        reject=(
            RejectionSection(by="token_k1", upper=1.2),
            RejectionSection(by="seq_max_k3", upper=0.1),
            RejectionSection(by="seq_sum_k2", upper=0.05),
        ),
    )
