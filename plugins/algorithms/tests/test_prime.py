"""PRIME: the estimator and the objective against loops written from the paper, and the stage's rewards and refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.config import config_from_mapping
from dovetail.errors import ColumnError, PlanError
from dovetail.interfaces import Groups, PluginContext
from dovetail.metrics import values
from dovetail.planning.plan import make_plan
from dovetail_algorithms.config.estimators import PrimeConfig
from dovetail_algorithms.config.objectives import ImplicitPrmConfig
from dovetail_algorithms.conformance import objectives, stages
from dovetail_algorithms.estimators.prime import PrimeEstimator
from dovetail_algorithms.objectives.implicit_prm import ImplicitPrm
from dovetail_sdk.testing import update_of

token = st.tuples(st.floats(-3, 3, width=32), st.booleans())
sample = st.tuples(st.lists(token, max_size=6), st.sampled_from([0.0, 0.5, 1.0]))
groups_of_samples = st.lists(st.lists(sample, min_size=1, max_size=4), min_size=1, max_size=3)


def batch_of(groups):
    """Return a batch of groups. A sample is a list of tokens (process reward, whether the policy produced the token) and an outcome."""
    samples = [sample for group in groups for sample in group]
    mask = Ragged.from_list([[own for _, own in tokens] for tokens, _ in samples], np.bool_)
    rewards_T = [reward if own else 0.0 for tokens, _ in samples for reward, own in tokens]
    return Batch(
        {
            "response_mask": mask,
            "process_rewards": mask.with_values(np.array(rewards_T, np.float32)),
            "scores": np.array([outcome for _, outcome in samples], np.float32),
            "group_id": np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        }
    )


def slow_prime(groups, gamma):
    """Compute the advantages of arXiv 2502.01456 token by token."""
    rows = []
    for group in groups:
        own = [[reward for reward, mine in tokens if mine] for tokens, _ in group]
        means = [sum(rewards) / len(rewards) if rewards else 0.0 for rewards in own]
        for i, (tokens, outcome) in enumerate(group):
            others = [j for j in range(len(group)) if j != i]
            row, later = [], 0.0
            baseline = sum(means[j] for j in others) / max(len(others), 1)
            above = outcome - sum(group[j][1] for j in others) / max(len(others), 1)
            for reward, mine in reversed(tokens):
                if mine:
                    later = reward - baseline + gamma * later
                row.append(later + above if mine and others else 0.0)
            rows += row[::-1]
    return np.array(rows)


@given(groups_of_samples, st.sampled_from([0.0, 0.9, 1.0]))
def test_advantages_are_the_papers(groups, gamma):
    batch = batch_of(groups)
    estimator = PrimeEstimator(PrimeConfig(name="prime", gamma=gamma), PluginContext())
    result = estimator.estimate(batch, Groups.of(batch["group_id"]))
    np.testing.assert_allclose(
        result.advantages.values, slow_prime(groups, gamma), rtol=1e-5, atol=1e-5
    )
    assert result.metrics["advantage/singleton_groups"] == sum(len(group) == 1 for group in groups)


def test_an_implicit_prm_by_hand():
    mask = Ragged.from_list([[True, True], [True], [False]], np.bool_)
    batch = Batch(
        {
            "response_mask": mask,
            "prm_ref_log_probs": mask.with_values(np.array([-1, -1, -2, 0], np.float32)),
            "prm_outcomes": np.array([1, 0, 1], np.float32),
        }
    )
    goal = ImplicitPrm(ImplicitPrmConfig(name="implicit_prm", beta=0.5), PluginContext())
    found = update_of(goal, batch, {"log_probs": np.array([0, 0, -1, -9], np.float32)})
    # The implicit rewards are 1 (right answer) and 0.5 (wrong answer). The last sample has no policy tokens.
    right, wrong = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.5))
    assert found.loss == pytest.approx(-(math.log(right) + math.log(1 - wrong)) / 2, rel=1e-6)
    expected = [0.25 * (right - 1), 0.25 * (right - 1), 0.25 * wrong, 0]
    assert found.gradients["log_probs"] == pytest.approx(expected, rel=1e-6)
    assert values(found.metrics) == pytest.approx({"prm/loss": found.loss, "prm/accuracy": 0.5})


@settings(max_examples=20)
@given(st.data())
def test_loss_and_gradient_are_the_oracles_however_samples_are_cut(data):
    suite = objectives.TestImplicitPrm()
    batch = suite.mini_batch(data.draw(st.integers(0, 1000)))
    outcomes = data.draw(st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8))
    batch = batch.with_columns({"prm_outcomes": np.array(outcomes, np.float32)})
    outputs = suite.outputs(batch, 0)
    expected, gradients = suite.oracle(batch, outputs)
    part_N = np.array(data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8)))
    found = suite.update(
        batch, outputs, parts=[np.flatnonzero(part_N == part).tolist() for part in range(3)]
    )
    assert found.loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(found.gradients["log_probs"], gradients["log_probs"], atol=1e-6)


def test_a_score_that_is_no_outcome_is_refused():
    suite = objectives.TestImplicitPrm()
    batch = suite.mini_batch(0).with_columns({"prm_outcomes": np.full(8, -0.1, np.float32)})
    with pytest.raises(ColumnError, match=r"-0\.1.*scores from 0 \(wrong\) to 1"):
        suite.update(batch, suite.outputs(batch, 0))


def test_process_rewards_are_beta_times_the_log_ratio():
    suite = stages.TestImplicitProcessRewards()
    batch = suite.columns(0)
    done, step = suite.run(batch)
    current = suite.outputs("prm", batch, frozenset({"log_probs"}))["log_probs"].values
    expected_T = 0.05 * (current.astype(np.float64) - batch["ref_log_probs"].values)
    np.testing.assert_allclose(done["process_rewards"].values, expected_T, atol=1e-6)
    assert step.metrics["prm/outcome_reward"] == pytest.approx(
        expected_T.sum() / len(batch), abs=1e-6
    )


def plan(**sections):
    config = {
        "model": {"path": "policy"},
        "rollout": {"n": 4},
        "algorithm": {"advantage": "prime"},
        "roles": {"prm": {"objective": "implicit_prm"}},
    }
    return make_plan(config_from_mapping(config | sections).config)


def test_the_estimator_brings_the_stage_the_reference_and_the_model():
    planned = plan()
    order = [stage.name for stage in planned.stages]
    assert order.index("score_ref") < order.index("implicit_process_rewards")
    assert order.index("implicit_process_rewards") < order.index("advantage")
    assert {model.role: model.trained for model in planned.models} == {
        "actor": True,
        "ref": False,
        "prm": True,
    }


def test_with_adapters_no_reference_is_loaded():
    lora = {"engine": {"name": "fsdp2", "lora": {"rank": 2}}}
    planned = plan(actor=lora)
    assert [model.role for model in planned.models] == ["actor", "prm"]


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"roles": {}}, "the role 'prm'"),
        ({"roles": {"prm": {"objective": "nll"}}}, "no setting `beta`"),
        ({"roles": {"prm": {"objective": "implicit_prm", "path": "other"}}}, "other"),
        ({"ref": {"update": {"every": 4}}}, "follows the actor"),
    ],
)
def test_a_config_without_the_model_or_its_reference_is_refused(sections, what):
    with pytest.raises(PlanError, match=what) as raised:
        plan(**sections)
    assert raised.value.hint
