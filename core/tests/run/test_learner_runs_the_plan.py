"""The learner runs exactly what the plan says, for every preset."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dovetail.batch import Batch
from dovetail.config import config_from_mapping
from dovetail.dispatch import Future
from dovetail.hooks import Observers, hookimpl
from dovetail.interfaces import PluginContext, StepContext
from dovetail.planning.plan import Plan, make_plan
from dovetail.plugins import make_plugin
from dovetail.plugins.index import default_index
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.build import _plugins_of_stages
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.interrupt import StopSwitch
from dovetail.run.learner import Learner
from dovetail.telemetry import RunDirectory
from dovetail.workers.offload import OffloadManager
from dovetail_rollouts.columns import columns_of
from dovetail_sdk.testing.conformance.stage_step import RandomModel, random_outputs, step_batch

GROUPS, SAMPLES = 3, 4


class Group(RandomModel):
    """A worker group whose passes give random columns, and whose updates change nothing."""

    def memory(self) -> Future[Any]:
        return Future.completed([{"rss_bytes": 1.0}, {"rss_bytes": 2.0}])


@attrs.define
class Seen:
    """The calls of the hook `stage_finished`."""

    stages: list[tuple[str, Batch, Batch]] = attrs.field(factory=list)

    @hookimpl
    def stage_finished(self, stage: str, before: Batch, after: Batch) -> None:
        self.stages.append((stage, before, after))


def learn(plan: Plan, directory: RunDirectory) -> tuple[Seen, StepContext]:
    """One step of the real stages over stub engines."""
    context = PluginContext(seed=1)
    stages: list[Any] = [make_plugin(stage.ref, context) for stage in plan.stages]
    seen, observers = Seen(), Observers()
    observers.add(seen)
    groups = {model.role: Group(model.role, random_outputs) for model in plan.models}
    record: Any = SimpleNamespace(
        plan=plan,
        config=plan.facts.config,
        directory=directory,
        hooks=observers.hook,
        stop=StopSwitch(),
        logger=SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None),
        phase=lambda name: nullcontext(),
        weights_dirty=False,
    )
    learner = Learner(
        record,
        stages,
        offload_manager=OffloadManager({}, record.phase),
        weights=ActorWeights(),
        source=SimpleNamespace(settle=lambda *_: None),  # type: ignore[arg-type]
        constant=ConstantColumns(plan, stages, directory.path),
    )
    names = columns_of(plan.facts) | learner.asks(1)
    batch = step_batch(names, seed=1, groups=GROUPS, n=SAMPLES, by_token=True)
    step = StepContext(
        number=1,
        facts=plan.facts,
        roles=groups,
        plugins=_plugins_of_stages(plan, context),
        logger=record.logger,
        timer=record.phase,
        first=True,
        updates={model.role: 0 for model in plan.models if model.trained},
        collected=SimpleNamespace(batch=lambda: batch, samples=(), reasons={}),
    )
    learner.learn(step)
    return seen, step


def planned(*overrides: str) -> Plan:
    mapping = {
        "model": {"path": "tiny"},
        "rollout": {"n": SAMPLES},
        "data": {"train_batch_size": GROUPS},
        "algorithm": {"logprob_check": {"stop_above": None}},
    }
    return make_plan(config_from_mapping(mapping, overrides).config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory.create(tmp_path_factory.mktemp("runs") / "run")


PRESETS = [(f"algorithm.preset={e.name}",) for e in default_index().entries("preset")]
OTHERS = [
    ("algorithm.kl.in_reward.coef=0.1", "algorithm.overlong_penalty.buffer=4"),
    ("algorithm.rollout_correction=decoupled_k3_rs_token_tis", "actor.epochs=2"),
    ("algorithm.rollout_correction=bypass_ppo_clip", "algorithm.advantage=optimal_token_baseline"),
    ("algorithm.sample_filters=[overlong]", "algorithm.kl.in_loss.coef=0.1"),
]


@pytest.mark.parametrize("overrides", [*PRESETS, *OTHERS], ids=lambda o: o[0].partition(".")[2])
def test_the_stages_that_ran_are_those_of_the_plan_with_the_versions_that_it_prints(
    overrides, directory
):
    plan = planned(*overrides)
    seen, step = learn(plan, directory)
    assert [name for name, _, _ in seen.stages] == [stage.name for stage in plan.stages]
    versions = dict.fromkeys(seen.stages[0][1].names, 1)
    for stage, (_, before, after) in zip(plan.stages, seen.stages, strict=True):
        assert {column: versions[column] for column in stage.reads} == dict(stage.reads)
        changed = {
            name
            for name, column in after.columns.items()
            if name not in before or column is not before[name]
        }
        assert changed == stage.provides | stage.rewrites
        for column in changed:
            versions[column] = versions.get(column, 0) + 1
    assert step.counted
    assert all(step.updates.values())
