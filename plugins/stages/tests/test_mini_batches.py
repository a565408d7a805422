"""Mini-batches of whole groups in several passes, and early stopping of a step's updates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Future
from dovetail.errors import ConfigError, NumericsError, PluginBrokenError
from dovetail.interfaces import ObjectiveSpec, PlanFacts, PluginRef, StepContext
from dovetail.metrics import EffectiveShare, Last, Max, Mean, Metric, Min, Std, Sum, values
from dovetail.sections import ModelSection, PluginSection, RunConfig
from dovetail.telemetry.timers import Timers
from dovetail_stages import resolve_metrics, weight_metrics
from dovetail_stages.mini_batches import (
    check_update_metrics,
    mini_batch_rows,
    shuffled_places,
    train_role,
)
from dovetail_stages.update_actor import with_loss_mask

OBJECTIVE = ObjectiveSpec(
    plugin=PluginRef(kind="objective", name="policy"), requires=frozenset(), outputs=()
)
ENGINE = PluginSection(name="fsdp2")


def plain_rows(groups: list[int], prompts: int) -> list[list[int]]:
    """One pass, by a loop: the k-th mini-batch has the distinct groups from position k·prompts on."""
    present = sorted(set(groups))
    cuts = [present[i : i + prompts] for i in range(0, len(present), prompts)]
    return [[row for row, group in enumerate(groups) if group in cut] for cut in cuts]


group_lists = st.lists(st.integers(0, 9), min_size=1, max_size=24)


@given(group_lists, st.integers(1, 5), st.integers(1, 3))
def test_a_pass_in_order_is_the_plain_loop(groups, prompts, epochs):
    cut = mini_batch_rows(np.array(groups), prompts=prompts, epochs=epochs, step=1)
    found = [rows.tolist() for rows in cut]
    assert found == plain_rows(groups, prompts) * epochs


@given(group_lists, st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_every_pass_takes_every_sample_once_in_whole_groups_and_none_is_empty(
    groups, prompts, seed, shuffle
):
    ids = np.array(groups)
    cut = mini_batch_rows(ids, prompts=prompts, epochs=2, shuffle=shuffle, seed=seed, step=3)
    found = [rows.tolist() for rows in cut]
    a_pass = -(-len(set(groups)) // prompts)
    assert len(found) == 2 * a_pass
    for epoch in range(2):
        pieces = found[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(row for rows in pieces for row in rows) == list(range(len(groups)))
        owners = [set(ids[rows].tolist()) for rows in pieces]
        assert sum(map(len, owners)) == len(set().union(*owners))
        assert all(len(owner) == prompts for owner in owners[:-1])
        assert all(rows == sorted(rows) and rows for rows in pieces)


def test_nothing_is_cut_from_nothing():
    none = mini_batch_rows(np.array([], np.int64), prompts=2, epochs=3, shuffle=True, step=1)
    assert list(none) == []


def test_an_order_follows_from_seed_step_and_pass_alone():
    def places(seed: int = 1, step: int = 1, epoch: int = 0) -> tuple[int, ...]:
        return tuple(shuffled_places(32, seed=seed, step=step, epoch=epoch).tolist())

    assert places() == places()
    assert len({places(), places(seed=2), places(step=2), places(epoch=1)}) == 4
    assert sorted(places()) == list(range(32))
    assert shuffled_places(6, seed=1, step=1, epoch=0).tolist() == GOLDEN


GOLDEN = [2, 4, 5, 3, 0, 1]
"""The order of groups for these arguments; it must never change, since resumed runs depend on it."""


class Group:
    """A worker group whose updates report a scripted KL, or fail."""

    def __init__(self, kls: list[Any], metric: str = "actor/approx_kl") -> None:
        self.kls = kls
        self.metric = metric
        self.seen: list[list[int]] = []

    def update(self, mini_batch: Batch, objective: Any) -> Future[Mapping[str, Metric]]:
        assert objective is OBJECTIVE
        self.seen.append(mini_batch["group_id"].tolist())
        kl = self.kls[len(self.seen) - 1]
        if isinstance(kl, Exception):
            return Future.failed(kl)
        metrics: dict[str, Metric] = {self.metric: Mean(kl * 2, 2.0)}
        return Future.completed(metrics)


def batch(groups: int = 4) -> Batch:
    return Batch({"group_id": np.repeat(np.arange(groups), 2)})


def step_of(group: Group, *, first: bool = False) -> StepContext:
    """Make step 1 of a run whose actor is this group."""
    engine: Any = SimpleNamespace(config=ENGINE)
    config = RunConfig(model=ModelSection(path="nowhere"))
    return StepContext(
        number=1,
        facts=PlanFacts(config=config, plugins={"actor.engine": engine}, updates_per_step=1),
        roles={"actor": group},  # type: ignore[dict-item]
        plugins={},
        logger=logging.getLogger(__name__),
        timer=Timers(),
        first=first,
        updates={"actor": 0},
    )


def train(step: StepContext, prompts: int, **settings: Any) -> tuple[dict[str, float], bool]:
    return train_role(
        "actor", batch(), step, OBJECTIVE, prompts=prompts, **{"epochs": 1, **settings}
    )


def test_metrics_are_merged_over_all_updates():
    group = Group([0.0, 0.2, 0.1, 0.3])
    step = step_of(group)
    metrics, stopped = train(step, 2, epochs=2)
    assert group.seen == [[0, 0, 1, 1], [2, 2, 3, 3]] * 2
    assert (step.updates, stopped) == ({"actor": 4}, False)
    assert metrics == {"actor/approx_kl": pytest.approx(0.15)}


@pytest.mark.parametrize(
    ("kls", "count", "stopped"),
    [
        ([0.0, 0.01, 0.02, 0.05], 4, False),
        ([0.0, 0.06, 0.0, 0.0], 2, True),
        ([0.0, 0.0, 0.0, 0.9], 4, False),  # no mini-batch was left to skip
        ([0.0, 0.05, 0.0, 0.0], 4, False),  # at the bound, not above
    ],
)
def test_what_is_left_of_a_step_is_left_out_once_the_policy_has_moved_too_far(kls, count, stopped):
    step = step_of(Group(kls))
    assert train(step, 2, epochs=2, max_kl=0.05)[1] == stopped
    assert step.updates == {"actor": count}


def test_a_bound_on_a_kl_that_no_update_reports_is_refused_at_the_first_update():
    group = Group([0.0, 0.0], metric="actor/other")
    with pytest.raises(ConfigError, match="actor/approx_kl") as caught:
        train(step_of(group), 2, max_kl=0.05)
    assert len(group.seen) == 1
    assert "actor's loss reports no metric actor/approx_kl" in caught.value.message
    assert "actor.max_kl" in str(caught.value.hint)
    assert "actor.objective" in str(caught.value.hint)
    assert not train(step_of(Group([0.0] * 2, "actor/other")), 2)[1]


def test_a_failing_update_ends_the_step_and_is_not_counted():
    step = step_of(Group([0.0, NumericsError("no"), 0.0, 0.0]))
    with pytest.raises(NumericsError, match="no"):
        train(step, 1)
    assert step.updates == {"actor": 1}


@pytest.mark.parametrize("first", [True, False])
def test_metrics_of_updates_are_checked_in_the_first_step_alone(first):
    step = step_of(Group([np.inf] * 2), first=first)
    with pytest.raises(PluginBrokenError) if first else nullcontext():
        train(step, 2)
    assert step.updates == {"actor": 1 if first else 2}


def test_the_actor_trains_on_the_loss_mask_where_there_is_one():
    response = Ragged.from_list([[True, True], [True]], dtype=np.bool_)
    lossy = Ragged.from_list([[True, False], [False]], dtype=np.bool_)
    plain = Batch({"response_mask": response})
    assert with_loss_mask(plain) is plain
    trained = with_loss_mask(plain.with_columns({"loss_mask": lossy}))
    assert trained.names == ("response_mask",)
    assert trained["response_mask"].equals(lossy)


def test_metrics_over_nothing_pass_and_give_no_figure():
    nothing_T = torch.zeros(3, dtype=torch.bool)
    ones_T = torch.ones(3)
    metrics = resolve_metrics([weight_metrics(ones_T, ones_T, nothing_T, lower=None, upper=2.0)])
    assert {Min(np.inf), Max(-np.inf), EffectiveShare(0, 0, 0)} <= set(metrics.values())
    check_update_metrics(metrics, "actor", ENGINE)
    assert values(metrics) == {}


@pytest.mark.parametrize(
    "metric",
    [
        Mean(np.inf, 2.0),
        Mean(np.nan, 2.0),
        Sum(np.nan),
        Last(np.nan),
        Max(np.inf),
        Max(np.nan),
        Min(-np.inf),
        Std(2.0, 0.0, np.inf),
        EffectiveShare(1.0, np.nan, 2.0),
    ],
)
def test_a_metric_that_is_not_finite_is_refused_and_stays_a_figure(metric):
    with pytest.raises(PluginBrokenError, match=r"'actor/x' with the value -?(inf|nan)"):
        check_update_metrics({"actor/x": metric}, "actor", ENGINE)
    assert "x" in values({"x": metric})
