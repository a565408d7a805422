"""MT-GRPO, GiGPO, bi-level GAE and discounts over turns against loops over turns written from the papers."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import (
    BiLevelGaeConfig,
    GaeConfig,
    GigpoConfig,
    GrpoConfig,
    MtGrpoConfig,
    ReinforcePlusPlusConfig,
)
from dovetail_algorithms.estimators.bi_level_gae import BiLevelGaeEstimator
from dovetail_algorithms.estimators.gae import GaeEstimator
from dovetail_algorithms.estimators.gigpo import GigpoEstimator
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_algorithms.estimators.mt_grpo import MtGrpoEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusEstimator

turns = st.tuples(
    st.integers(1, 3),  # tokens that the policy produced
    st.integers(0, 2),  # what was shown before a turn that is not the first: one of three texts
    st.sampled_from([-0.5, 0.0, 0.25, 1.0]),  # the turn's reward, on its last token
)
episodes = st.lists(turns, min_size=1, max_size=4)
groups_of_episodes = st.lists(st.lists(episodes, min_size=1, max_size=4), min_size=1, max_size=3)
shares = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def packed(groups, seed=0, split=1):
    """Return the batch of groups of episodes; shown tokens are repeated `split` times, as if they were several observations."""
    rng = np.random.default_rng(seed)
    rows = []
    for group, members in enumerate(groups):
        for episode in members:
            ids, mask, numbers, rewards = [], [], [], []
            for number, (length, shown, reward) in enumerate(episode):
                before = [100 + shown] * (split if number else 0)
                ids += [*before, *rng.integers(0, 9, length)]
                mask += [False] * len(before) + [True] * length
                numbers += [-1] * len(before) + [number] * length
                rewards += [0.0] * (len(before) + length - 1) + [reward]
            rows.append((group, ids, mask, numbers, rewards))
    column = lambda at, dtype: Ragged.from_list([row[at] for row in rows], dtype=dtype)  # noqa: E731
    mask = column(2, np.bool_)
    rewards = column(4, np.float32)
    values_T = rng.normal(size=mask.total).astype(np.float32)
    return Batch(
        {
            "group_id": np.array([row[0] for row in rows]),
            "prompt_ids": Ragged.from_list([[row[0], 7] for row in rows], dtype=np.int64),
            "response_ids": column(1, np.int64),
            "response_mask": mask,
            "turn_ids": column(3, np.int64),
            "token_rewards": rewards,
            "scores": rewards.sum().astype(np.float32),
            "values": mask.with_values(values_T),
        }
    )


def estimate(estimator, config, batch):
    groups = Groups.of(batch["group_id"], batch.columns.get("trajectory_id"))
    return estimator(config, PluginContext()).estimate(batch, groups)


def forked(batch, seed):
    """Return the batch with episodes cut into sequences before some turns; the tokens shown there are the new sequence's prompt."""
    rng = np.random.default_rng(seed)
    parts, prompts, owners = {}, [], []
    names = ("response_ids", "response_mask", "turn_ids", "token_rewards")
    for row, mask_T in enumerate(batch["response_mask"]):
        ids_T, numbers_T = batch["response_ids"][row], batch["turn_ids"][row]
        begins = [
            k for k in range(1, len(mask_T)) if mask_T[k] and numbers_T[k] != numbers_T[k - 1]
        ]
        cuts = [k for k in begins if rng.random() < 0.5]
        for start, stop in zip([0, *cuts], [*cuts, len(mask_T)], strict=True):
            if start:
                prompts.append(ids_T[start - 1 : start])
            else:
                prompts.append(batch["prompt_ids"][row])
            owners.append(row)
            end = stop - 1 if stop < len(mask_T) else stop  # shown tokens begin the next prompt
            for name in names:
                parts.setdefault(name, []).append(batch[name][row][start:end])
    columns = {
        name: Ragged.from_list(rows, dtype=batch[name].dtype) for name, rows in parts.items()
    }
    columns["prompt_ids"] = Ragged.from_list(prompts, dtype=np.int64)
    owners_N = np.array(owners)
    dense = {name: batch[name][owners_N] for name in ("group_id", "scores")}
    return Batch({**dense, "trajectory_id": owners_N, **columns})


@pytest.mark.parametrize(
    ("estimator", "config"),
    [(MtGrpoEstimator, MtGrpoConfig()), (GigpoEstimator, GigpoConfig(gamma=0.5))],
)
@settings(max_examples=15, deadline=None)
@given(groups=groups_of_episodes, seed=st.integers(0, 99))
def test_an_episode_that_was_forked_has_the_advantages_of_one_that_was_not(
    estimator, config, groups, seed
):
    batch = packed(groups)
    other = forked(batch, seed)
    order = np.random.default_rng(seed).permutation(len(other))
    whole = estimate(estimator, config, batch).advantages.values[batch["response_mask"].values]
    back = estimate(estimator, config, other.take(order)).advantages.take(np.argsort(order))
    parts = back.values[other["response_mask"].values]
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def relative(value, others, by_std=True):
    """Compute (x − mean) / (std + 1e-6) over values that include x; 0 if all are equal."""
    if max(others) == min(others):
        return 0.0
    scale = np.std(others, ddof=1) + 1e-6 if by_std else 1.0
    return (value - np.mean(others)) / scale


def by_token(groups, advantage):
    """Spread the advantages of turns, by (group, episode, turn), over the tokens of `packed(groups)`."""
    return np.concatenate(
        [
            np.repeat([0.0, advantage(g, e, k)], [bool(k), length])
            for g, members in enumerate(groups)
            for e, episode in enumerate(members)
            for k, (length, _, _) in enumerate(episode)
        ]
    )


@settings(max_examples=15, deadline=None)
@given(groups_of_episodes, st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_mt_grpo_adds_a_turns_own_advantage_to_the_outcomes(groups, weight, by_std):
    config = MtGrpoConfig(turn_weight=weight, norm_by_std=by_std)
    result = estimate(MtGrpoEstimator, config, packed(groups))

    def advantage(g, e, k):
        members, mine = groups[g], groups[g][e]
        if len(members) == 1:
            return 0.0
        outcome = relative(mine[-1][2], [other[-1][2] for other in members], by_std)
        if k == len(mine) - 1:
            return outcome
        same = [other[k][2] for other in members if k < len(other) - 1]
        return outcome + weight * relative(mine[k][2], same, by_std)

    np.testing.assert_allclose(result.advantages.values, by_token(groups, advantage), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(groups_of_episodes, shares, st.booleans())
def test_gigpo_compares_turns_that_were_shown_the_same(groups, gamma, by_std):
    config = GigpoConfig(step_weight=0.5, gamma=gamma, norm_by_std=by_std)
    result = estimate(GigpoEstimator, config, packed(groups))

    def to_go(episode, k):
        return sum(gamma ** (j - k) * episode[j][2] for j in range(k, len(episode)))

    def state(episode, k):
        return None if k == 0 else episode[k][1]

    def advantage(g, e, k):
        members, mine = groups[g], groups[g][e]
        if len(members) == 1:
            return 0.0
        total = [sum(turn[2] for turn in other) for other in members]
        same = [
            to_go(other, j)
            for other in members
            for j in range(len(other))
            if state(other, j) == state(mine, k)
        ]
        return relative(total[e], total, by_std) + 0.5 * relative(to_go(mine, k), same, by_std)

    np.testing.assert_allclose(
        result.advantages.values, by_token(groups, advantage), rtol=1e-4, atol=1e-4
    )


@settings(max_examples=15, deadline=None)
@given(groups_of_episodes, shares, shares, shares, shares, st.integers(0, 99))
def test_bi_level_gae_is_the_recursion_over_turns_and_then_over_tokens(
    groups, gamma, lam, turn_gamma, turn_lam, seed
):
    batch = packed(groups, seed)
    config = BiLevelGaeConfig(
        gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam, whiten=False
    )
    result = estimate(BiLevelGaeEstimator, config, batch)
    expected = []
    columns = [batch[name] for name in ("token_rewards", "values", "turn_ids")]
    for rewards, values, numbers in zip(*columns, strict=True):
        row = np.zeros(len(rewards))
        own = np.flatnonzero(numbers >= 0)[::-1]
        later, next_value = 0.0, 0.0
        for at, after in zip(own, [None, *own[:-1]], strict=True):
            if after is None or numbers[after] != numbers[at]:
                delta = float(rewards[at]) + turn_gamma * next_value - float(values[at])
                later, next_value = delta + turn_gamma * turn_lam * later, float(values[at])
                row[at] = later
            else:
                delta = float(rewards[at]) + gamma * float(values[after]) - float(values[at])
                row[at] = delta + gamma * lam * row[after]
        expected += row.tolist()
    np.testing.assert_allclose(result.advantages.values, expected, atol=1e-5)
    produced_T = batch["response_mask"].values
    returns_T = np.where(produced_T, np.array(expected) + batch["values"].values, 0)
    np.testing.assert_allclose(result.returns.values, returns_T, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(groups_of_episodes)
def test_bi_level_gae_without_discounts_is_gae(groups):
    batch = packed(groups)
    plain = estimate(GaeEstimator, GaeConfig(), batch).advantages.values
    found = estimate(BiLevelGaeEstimator, BiLevelGaeConfig(turn_gamma=1.0), batch).advantages.values
    np.testing.assert_allclose(found, plain, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(groups_of_episodes, shares, shares)
def test_a_discount_over_turns_counts_turns_and_one_over_tokens_tokens(groups, gamma, turn_gamma):
    batch = packed(groups)
    returns = []
    values_gae = []
    columns = [batch[name] for name in ("token_rewards", "values", "turn_ids")]
    for rewards, values, numbers in zip(*columns, strict=True):
        row, gae = np.zeros(len(rewards)), np.zeros(len(rewards))
        after = None
        for at in np.flatnonzero(numbers >= 0)[::-1]:
            decay = 0.0
            if after is not None:
                decay = gamma if numbers[after] == numbers[at] else turn_gamma
            later, value, advantage = (
                (0.0, 0.0, 0.0) if after is None else (row[after], float(values[after]), gae[after])
            )
            row[at] = float(rewards[at]) + decay * later
            delta = float(rewards[at]) + decay * value - float(values[at])
            gae[at] = delta + decay * 0.9 * advantage
            after = at
        returns += row.tolist()
        values_gae += gae.tolist()
    config = ReinforcePlusPlusConfig(gamma=gamma, turn_gamma=turn_gamma)
    found = estimate(ReinforcePlusPlusEstimator, config, batch)
    np.testing.assert_allclose(found.returns.values, returns, atol=1e-5)
    config = GaeConfig(gamma=gamma, turn_gamma=turn_gamma, lam=0.9, whiten=False)
    found = estimate(GaeEstimator, config, batch)
    np.testing.assert_allclose(found.advantages.values, values_gae, atol=1e-5)


CHOSEN = [
    (MtGrpoEstimator, MtGrpoConfig()),
    (GigpoEstimator, GigpoConfig()),
    (BiLevelGaeEstimator, BiLevelGaeConfig(whiten=False)),
    (GaeEstimator, GaeConfig(turn_gamma=0.9, whiten=False)),
    (ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(turn_gamma=0.9)),
]


@pytest.mark.parametrize(("estimator", "config"), CHOSEN)
@settings(max_examples=10, deadline=None)
@given(groups=groups_of_episodes)
def test_how_what_is_shown_was_split_does_not_matter(estimator, config, groups):
    """One observation of three tokens equals three of one; the shown tokens' values have no effect either."""
    values_K, found = None, []
    for split in (1, 3):
        batch = packed(groups, split=split)
        produced_T = batch["response_mask"].values
        if values_K is None:
            values_K = batch["values"].values[produced_T]
        values_T = np.full(len(produced_T), np.float32(9))
        values_T[produced_T] = values_K
        columns = {"values": batch["values"].with_values(values_T)}
        advantages = estimate(estimator, config, batch.with_columns(columns)).advantages.values
        assert not advantages[~produced_T].any()
        found.append(advantages[produced_T])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_episodes_of_one_turn_get_the_advantages_of_grpo():
    groups = [[[(2, 0, 1.0)], [(3, 0, 0.0)], [(1, 0, 0.25)]]]
    batch = packed(groups)
    expected = estimate(GrpoEstimator, GrpoConfig(), batch).advantages
    expected_T = np.repeat(expected, batch["response_mask"].lengths)
    found = estimate(MtGrpoEstimator, MtGrpoConfig(), batch).advantages.values
    np.testing.assert_allclose(found, expected_T, rtol=1e-6)
    found = estimate(GigpoEstimator, GigpoConfig(step_weight=0.0), batch).advantages.values
    np.testing.assert_allclose(found, expected_T, rtol=1e-6)


@pytest.mark.parametrize("config", [GaeConfig, ReinforcePlusPlusConfig, BiLevelGaeConfig])
def test_a_discount_over_turns_is_a_share(config):
    with pytest.raises(ValueError, match="turn_gamma"):
        config(turn_gamma=1.5)


def test_numbers_of_turns_are_required_where_turns_are_discounted():
    assert "turn_ids" not in GaeEstimator.requires(GaeConfig())
    assert "turn_ids" in GaeEstimator.requires(GaeConfig(turn_gamma=0.9))
    assert "turn_ids" in ReinforcePlusPlusEstimator.requires(ReinforcePlusPlusConfig(turn_gamma=1))
