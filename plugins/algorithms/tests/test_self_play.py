"""Pairs of a rollout, win rates and the squared loss of self-play: compared with values by hand and with loops."""

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.config import config_from_mapping
from dovetail.errors import ColumnError, PlanError
from dovetail.interfaces import Groups, PluginContext
from dovetail.metrics import values
from dovetail.planning.plan import make_plan
from dovetail_algorithms.config.estimators import WinRateConfig
from dovetail_algorithms.config.objectives import SppoConfig
from dovetail_algorithms.conformance import objectives, stages
from dovetail_algorithms.estimators.win_rate import WinRateEstimator
from dovetail_algorithms.objectives.sppo import Sppo
from dovetail_sdk.testing import template_tokenizer, update_of
from dovetail_sdk.testing.chat_templates import CHATML

scores_of_groups = st.lists(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def scored(groups):
    """A batch of groups with these scores."""
    sizes = [len(group) for group in groups]
    return Batch(
        {
            "scores": np.array([score for group in groups for score in group], np.float32),
            "group_id": np.repeat(np.arange(len(groups)) * 3, sizes),
            "sample_index": np.concatenate([np.arange(size) for size in sizes]),
            "sample_id": [f"{g}/{i}" for g, size in enumerate(sizes) for i in range(size)],
        }
    )


def paired(batch):
    """Return the stage's pairs for a batch, and its metrics."""
    suite = stages.TestBestWorstPairs()
    stage, step = suite.started(), suite.step(suite.columns(0))
    return stage.run(batch, step), step.metrics


@given(scores_of_groups, st.randoms(use_true_random=False))
def test_pairs_are_the_first_of_the_best_and_of_the_worst_in_any_order(groups, random):
    batch = scored(groups)
    order = list(range(len(batch)))
    random.shuffle(order)
    done, metrics = paired(batch.take(np.array(order)))
    expected = []
    for number, group in enumerate(groups):
        best, worst = group.index(max(group)), group.index(min(group))
        if max(group) > min(group):
            expected += [(f"{number}/{best}", True), (f"{number}/{worst}", False)]
    assert list(zip(done["sample_id"], done["chosen"].tolist(), strict=True)) == expected
    assert done["pair_id"].tolist() == [row // 2 for row in range(len(expected))]
    assert metrics["reward/pairs"] == len(expected) / 2
    assert metrics["reward/tied_groups"] == len(groups) - len(expected) / 2


def test_the_margin_is_the_mean_of_those_that_are_kept():
    _, metrics = paired(scored([[0.0, 1.0, 0.5], [2.0, 2.0], [-1.0, 2.0]]))
    assert metrics["reward/pair_margin"] == pytest.approx((1 + 3) / 2)


@given(scores_of_groups, st.sampled_from(["wins", "bradley_terry"]))
def test_win_rates_count_every_comparison(groups, comparison):
    batch = scored(groups)
    estimator = WinRateEstimator(
        WinRateConfig(name="win_rate", comparison=comparison), PluginContext()
    )
    found = estimator.estimate(batch, Groups.of(batch["group_id"])).advantages

    def preferred(one, other):
        if comparison == "bradley_terry":
            return 1 / (1 + math.exp(other - one))
        return 1.0 if one > other else 0.5 if one == other else 0.0

    expected = [
        sum(preferred(one, other) for other in group) / len(group) - 0.5
        for group in groups
        for one in group
    ]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sppo_by_hand():
    mask = Ragged.from_list([[True, True], [True], [False]], np.bool_)
    batch = Batch(
        {
            "response_mask": mask,
            "ref_log_probs": mask.with_values(np.array([-1, -1, -2, 0], np.float32)),
            "advantages": np.array([0.5, -0.25, 0.5], np.float32),
        }
    )
    goal = Sppo(SppoConfig(name="sppo", eta=4.0), PluginContext())
    found = update_of(goal, batch, {"log_probs": np.array([0, -0.5, -2.5, -9], np.float32)})
    # Log-ratios are 1.5 and -0.5, targets 2 and -1. The last sample has no policy tokens.
    assert found.loss == pytest.approx((0.5**2 + 0.5**2) / 2)
    assert found.gradients["log_probs"] == pytest.approx([-0.5, -0.5, 0.5, 0])
    assert values(found.metrics) == pytest.approx({"actor/loss": 0.25, "actor/kl": 0.5})


def test_a_policy_at_its_targets_stays_there():
    suite = objectives.TestSppo()
    batch = suite.mini_batch(0)
    mask, reference = batch["response_mask"], batch["ref_log_probs"]
    counts = np.maximum(mask.sum(), 1)
    share_T = np.repeat(4.0 * batch["advantages"] / counts, mask.lengths)
    outputs = {"log_probs": (reference.values + share_T).astype(np.float32)}
    found = suite.update(batch, outputs)
    assert found.loss == pytest.approx(0, abs=1e-9)
    assert found.gradients["log_probs"] == pytest.approx(0, abs=1e-5)


def test_advantages_of_tokens_are_refused():
    suite = objectives.TestSppo()
    batch = suite.mini_batch(0)
    batch = batch.with_columns({"advantages": batch["ref_log_probs"]})
    with pytest.raises(ColumnError, match="per token"):
        suite.update(batch, suite.outputs(batch, 0))


def plan(**sections):
    config = {"model": {"path": "policy"}, "rollout": {"n": 4}}
    return make_plan(config_from_mapping(config | sections).config)


def test_pairs_are_made_before_anything_is_scored():
    planned = plan(actor={"objective": "dpo"}, algorithm={"stages": [{"name": "best_worst_pairs"}]})
    names = [stage.name for stage in planned.stages]
    assert names[0] == "best_worst_pairs"
    assert "score_ref" in names
    assert "advantage" not in names


def test_pairs_of_single_samples_are_refused():
    with pytest.raises(PlanError, match=r"rollout\.n is 1"):
        plan(
            actor={"objective": "dpo"},
            rollout={"n": 1},
            algorithm={"stages": [{"name": "best_worst_pairs"}]},
        )


def test_an_objective_of_pairs_without_a_stage_that_makes_them_says_how():
    with pytest.raises(PlanError, match="chosen") as raised:
        plan(actor={"objective": "dpo"})
    assert "algorithm.stages" in (raised.value.hint or "")


def test_spin_prefers_the_datasets_response_to_every_answer_that_differs():
    suite = stages.TestSpinPairs()
    batch = suite.columns(0)
    # The second sample's response equals the dataset's.
    tokenizer = template_tokenizer(CHATML)
    same = tokenizer("abc" + tokenizer.eos_token)["input_ids"]
    rows = [same if row == 1 else ids.tolist() for row, ids in enumerate(batch["response_ids"])]
    responses = Ragged.from_list(rows, np.int64)
    batch = batch.with_columns(
        {
            name: responses.with_values(np.ones(len(responses.values), column.dtype))
            for name, column in batch.columns.items()
            if isinstance(column, Ragged) and name != "prompt_ids"
        }
        | {"response_ids": responses}
    )
    done, step = suite.run(batch)
    assert len(done) == 2 * (len(batch) - 1)
    assert step.metrics["reward/equal_answers"] == 1
    assert done["pair_id"].tolist() == [row // 2 for row in range(len(done))]
    kept = [row for row in range(len(batch)) if row != 1]
    for pair, row in enumerate(kept):
        data, own = 2 * pair, 2 * pair + 1
        assert done["response_ids"][data].tolist() == same
        assert done["response_mask"][data].all()
        assert done["token_weight_versions"][data].tolist() == [-1] * 4
        assert done["response_ids"][own].tolist() == rows[row]
        assert done["chosen"][data]
        assert not done["chosen"][own]
        for side in (data, own):
            assert done["prompt_ids"][side].tolist() == batch["prompt_ids"][row].tolist()
    assert len(set(done["sample_id"])) == len(set(done["trajectory_id"].tolist())) == len(done)


@pytest.mark.parametrize(
    ("overrides", "ends"),
    [((), 1), (("data.control_tokens=allow",), 2), (("data.plain_prompts=raw",), 2)],
)
def test_the_datasets_response_spells_no_end_of_its_own(overrides, ends):
    tokenizer = template_tokenizer(CHATML)
    suite = stages.TestSpinPairs()
    suite.overrides = (*suite.overrides, *overrides)
    batch = suite.columns(0)
    step = suite.step(batch)
    response = f"a{tokenizer.eos_token}b"
    samples = [
        attrs.evolve(sample, prompt=attrs.evolve(sample.prompt, response=response))
        for sample in step.experience.samples
    ]
    step.collected = attrs.evolve(step.experience, samples=samples)
    ids = suite.started().run(batch, step)["response_ids"][0].tolist()
    assert tokenizer.decode(ids) == f"{response}{tokenizer.eos_token}"
    assert ids.count(tokenizer.eos_token_id) == ends
