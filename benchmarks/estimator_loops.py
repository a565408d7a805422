"""The straightforward form of every advantage estimator: padded arrays, a loop over groups, samples or time steps.

Each takes the padded batch by column: [N, L] for what has a value a token, [N] or a list for what has one a sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

EPSILON = 1e-6


def _by_group(group_id: np.ndarray) -> dict[int, list[int]]:
    groups = defaultdict(list)
    for i, group in enumerate(group_id):
        groups[int(group)].append(i)
    return groups


def _each_group(
    batch: Mapping[str, Any], advantages_of: Callable[[np.ndarray, list[int]], np.ndarray]
) -> np.ndarray:
    advantages = np.zeros(len(batch["scores"]))
    for members in _by_group(batch["group_id"]).values():
        advantages[members] = advantages_of(batch["scores"][members], members)
    return advantages


def grpo(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards in units of their group's spread."""
    return _each_group(batch, lambda r, _: (r - r.mean()) / (r.std(ddof=1) + EPSILON))


def dr_grpo(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards less their group's mean."""
    return _each_group(batch, lambda r, _: r - r.mean())


def rloo(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards less the mean of the others."""
    return _each_group(batch, lambda r, _: r - (r.sum() - r) / (len(r) - 1))


def opo(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards less their mean weighted by length."""
    lengths = batch["response_mask"].sum(axis=1)

    def one(r: np.ndarray, members: list[int]) -> np.ndarray:
        n = lengths[members]
        return r - (n * r).sum() / n.sum()

    return _each_group(batch, one)


def gpg(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards less their mean, scaled for equal groups."""
    groups = _by_group(batch["group_id"]).values()
    equal = sum(len(m) for m in groups if np.all(batch["scores"][m] == batch["scores"][m[0]]))
    count = len(batch["scores"])
    return dr_grpo(batch) * count / max(count - equal, 1)


def grpo_passk(batch: Mapping[str, Any]) -> np.ndarray:
    """The lead of the best sample."""

    def one(r: np.ndarray, _: list[int]) -> np.ndarray:
        order = np.argsort(r)
        out = np.zeros(len(r))
        out[order[-1]] = r[order[-1]] - r[order[-2]]
        return out

    return _each_group(batch, one)


def _whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    count = mask.sum()
    mean = (values * mask).sum() / count
    var = (np.square(values - mean) * mask).sum() / (count - 1)
    return (values - mean) / np.sqrt(var + 1e-8) * mask


def reinforce_plus_plus_baseline(batch: Mapping[str, Any]) -> np.ndarray:
    """Rewards less their mean, whitened over tokens."""
    return _whiten(dr_grpo(batch)[:, None] * batch["response_mask"], batch["response_mask"])


def gdpo(batch: Mapping[str, Any]) -> np.ndarray:
    """Each component in units of its spread, added and whitened over tokens."""
    total = np.zeros(len(batch["scores"]))
    for name in ("accuracy", "format"):
        part = np.array([row[name] for row in batch["reward_components"]])
        total += grpo({**batch, "scores": part})
    return _whiten(total[:, None] * batch["response_mask"], batch["response_mask"])


def gae(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A loop over time steps, γ = λ = 1 as the defaults are."""
    rewards, values, mask = batch["token_rewards"], batch["values"], batch["response_mask"]
    later = next_values = np.zeros(len(rewards), np.float32)
    advantages = np.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + next_values - values[:, t]
        later = np.where(mask[:, t], delta + later, later)
        next_values = np.where(mask[:, t], values[:, t], next_values)
        advantages[:, t] = later
    advantages *= mask
    return _whiten(advantages, mask), (advantages + values) * mask


def reinforce_plus_plus(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A loop over time steps, γ = 1 as the default is."""
    rewards, mask = batch["token_rewards"], batch["response_mask"]
    later = np.zeros(len(rewards), np.float32)
    returns = np.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        later = np.where(mask[:, t], rewards[:, t] + later, later)
        returns[:, t] = later
    returns *= mask
    return _whiten(returns, mask), returns


def remax(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A loop over samples."""
    rewards, mask = batch["token_rewards"], batch["response_mask"]
    returns = np.zeros_like(rewards)
    advantages = np.zeros_like(rewards)
    for i in range(len(rewards)):
        returns[i] = np.cumsum((rewards[i] * mask[i])[::-1])[::-1] * mask[i]
        advantages[i] = (returns[i] - batch["baseline_scores"][i]) * mask[i]
    return advantages, returns


def optimal_token_baseline(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A loop over groups, on the whole padded length."""
    rewards, mask = batch["token_rewards"], batch["response_mask"]
    returns = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1] * mask
    energy = 1 - 2 * np.exp(batch["old_log_probs"]) + batch["sum_pi_squared"]
    weights = np.cumsum(energy * mask, axis=1) * mask
    baselines = np.zeros_like(rewards)
    for members in _by_group(batch["group_id"]).values():
        w, g = weights[members], returns[members]
        baseline = (g * w).sum(axis=0) / (w.sum(axis=0) + 1e-8)
        longest, second = sorted(mask[members].sum(axis=1))[-2:][::-1]
        baseline[second:] = 0 if longest > second else baseline[second:]
        baselines[members] = baseline
    return (returns - baselines) * mask, returns


def tir_optimal_token_baseline(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tool tokens moved out sample by sample, then as `optimal_token_baseline`, and back."""
    mask = batch["response_mask"]
    names = ("token_rewards", "old_log_probs", "sum_pi_squared", "response_mask")
    compact = {name: np.zeros_like(batch[name]) for name in names}
    for i in range(len(mask)):
        own = mask[i].sum()
        for name in names:
            compact[name][i, :own] = batch[name][i, mask[i]]
    advantages, returns = optimal_token_baseline({**compact, "group_id": batch["group_id"]})
    back = np.zeros_like(advantages)
    for i in range(len(mask)):
        back[i, mask[i]] = advantages[i, : mask[i].sum()]
    return back, returns


NAMES = (
    "grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "opo", "reinforce_plus_plus_baseline", "gdpo", "remax",
    "reinforce_plus_plus", "gae", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
