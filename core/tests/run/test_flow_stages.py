"""The stages of a step over fakes: what is asked, trained, sent, accounted for and saved, and what a fault leaves behind."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.builtin import AdaptiveKlConfig, OnPolicyConfig, SequentialConfig
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.data.samplers import SequentialSampler
from dovetail.dispatch import Future
from dovetail.errors import NumericsError, StopRequested
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.interfaces import (
    AdvantageEstimator,
    Advantages,
    Groups,
    ObjectiveSpec,
    PluginContext,
    PluginRef,
    Prompt,
    RewardManager,
    SampleFilter,
    Score,
    ValueObjectiveSpec,
    WeightManifest,
)
from dovetail.metrics import Last
from dovetail.numerics.kl_controller import AdaptiveKl
from dovetail.planning.counts import Counts
from dovetail.planning.placement import Placement
from dovetail.planning.plan import Plan
from dovetail.planning.stages import Stage
from dovetail.run.broadcast import Trackers
from dovetail.run.flow import Flow
from dovetail.run.on_policy import OnPolicyTrainer
from dovetail.run.parts import Parts
from dovetail.run.state import RunState
from dovetail.sections import (
    ActorSection,
    AlgorithmSection,
    DataSection,
    ModelSection,
    PluginSection,
    Pool,
    RolloutSection,
    RunConfig,
    TrainerSection,
)
from dovetail.sections.algorithm import GateSection, KlInRewardSection, KlSection
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.timers import Timers
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

AGGREGATION = PluginRef(kind="loss_aggregation", name="token_mean")
OBJECTIVE = ObjectiveSpec(
    policy_loss=PluginRef(kind="policy_loss", name="ppo_clip"), loss_aggregation=AGGREGATION
)


class Group:
    """A worker group: its forward passes give one constant, its updates report or raise what a script says."""

    def __init__(self, output: float = 0.0, script: Any = ()) -> None:
        self.output = output
        self.script = list(script)
        self.passes: list[tuple[int, frozenset[str]]] = []
        self.trained: list[Batch] = []
        self.sent: list[int] = []

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Future[Batch]:
        self.passes.append((len(batch), outputs))
        mask = batch["response_mask"]
        values = mask.with_values(np.full(len(mask.values), self.output, np.float32))
        return Future.completed(Batch(dict.fromkeys(outputs, values)))

    def update(self, mini_batch: Batch, objective: Any) -> Future[Any]:
        happens = self.script.pop(0) if self.script else 0.0
        if isinstance(happens, Exception):
            return Future.failed(happens)
        self.trained.append(mini_batch)
        return Future.completed({"actor/approx_kl": Last(happens)})

    def weight_manifest(self, version: int) -> Future[WeightManifest]:
        return Future.completed(WeightManifest(version=version, tensors=()))

    def send_weights(self, version: int, manifest: WeightManifest) -> Future[None]:
        self.sent.append(version)
        return Future.completed(None)

    def save(self, directory: Path) -> Future[None]:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(str(len(self.trained)))
        return Future.completed(None)


class Manager(RewardManager):
    name = "parity"
    api = ">=1.0,<2"

    async def score(self, unit: Any) -> list[Any]:
        return [Score(value=float(len(sample.response_ids) % 2)) for sample in unit.samples]


class Estimator(AdvantageEstimator):
    name = "plain"
    api = ">=1.0,<2"
    scope = "sample"
    level = "sample"

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        return Advantages(advantages=columns["scores"], returns=columns["token_rewards"])


class Nothing(SampleFilter):
    name = "nothing"
    api = ">=1.0,<2"
    action = "drop"

    def keep(self, columns: Batch, groups: Groups) -> np.ndarray:
        return np.zeros(len(columns), np.bool_)


class Logger:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(event)


def made(cls: Any, config: Any = None) -> Any:
    return cls(config or PluginSection(name=cls.name), PluginContext())


def make_flow(tmp_path: Path, *, plan: dict[str, Any] | None = None, **parts: Any) -> Flow:
    """A flow of two prompts a step with two samples each, and no stage that is not asked for."""
    config = RunConfig(
        model=ModelSection(path="nowhere"),
        data=DataSection(train_batch_size=2, max_response_length=5),
        rollout=RolloutSection(n=2),
        trainer=TrainerSection(),
        actor=parts.pop("training", ActorSection()),
        algorithm=parts.pop("algorithm", AlgorithmSection(gate=GateSection(every=0))),
    )
    counts = Counts(
        prompts_per_step=2,
        samples_per_prompt=2,
        prompts_per_mini_batch=1,
        epochs_per_step=1,
        critic_prompts_per_mini_batch=2,
        critic_epochs_per_step=1,
        train_prompts=6,
        steps=3,
    )
    planned = Plan(
        stages=tuple(Stage(name=name, who="", because="") for name in ("rollout", "update")),
        models=(),
        refs={"rollout.weight_transport": PluginRef(kind="weight_transport", name="in_process")},
        counts=counts,
        demands={},
        rollout_log_probs=False,
        raw_rollout_log_probs=False,
        actor_outputs=frozenset(),
        ref_from_actor=False,
        bypass=False,
        gate_log_probs=(),
        objective=OBJECTIVE,
        value_objective=None,
        placement=Placement(
            pools=(Pool(name="here", roles=("actor", "rollout")),),
            replicas=1,
            runtime="inline",
            in_process=True,
        ),
    )
    ledger, logger = Ledger(), Logger()
    prompts = [Prompt(index=i, prompt_ids=np.arange(2), raw=str(i)) for i in range(6)]
    run = RunDirectory.create(tmp_path / "run")
    engine = ScriptedRollout.following(Script(answer=lambda _, sample: [1] * (sample + 1)))
    given = {
        "config": config,
        "plan": attrs.evolve(planned, **(plan or {})),
        "run_directory": run,
        "tokenizer": SimpleNamespace(decode=lambda ids, **_: str(len(ids))),
        "ledger": ledger,
        "loader": PromptLoader(prompts, made(SequentialSampler, SequentialConfig()), 2, ledger),
        "val_prompts": [],
        "actor": Group(),
        "critic": None,
        "ref": None,
        "trainer": made(OnPolicyTrainer, OnPolicyConfig()),
        "pool": RolloutPool([engine]),
        "manager": made(Manager),
        "estimator": made(Estimator),
        "filters": {},
        "correction": None,
        "kl_controllers": {},
        "trackers": Trackers([], logger),
        "observers": SimpleNamespace(emit=lambda *_, **__: None),
        "store": CheckpointStore(run.checkpoints),
        "timers": Timers(),
        "logger": logger,
        "runtime": None,
        "started": ExitStack(),
    }
    return Flow(Parts(**{**given, **parts}), RunState())


def engine_of(flow: Flow) -> Any:
    return flow._parts.pool.replicas[0]


def one_step(flow: Flow) -> None:
    with flow.begin_step():
        rollout = flow.rollout_and_score(flow.loader.next_batch())
        batch = flow.prepare(rollout)
        batch = flow.estimate_advantages(batch)
        flow.update(batch)
        flow.sync_weights()


def run(flow: Flow, steps: int) -> None:
    with flow.running():
        flow.sync_weights()
        for _ in range(steps):
            one_step(flow)


def test_a_step_trains_sends_and_accounts(tmp_path):
    flow = make_flow(tmp_path)
    run(flow, 2)
    assert flow.step == 2
    assert [batch["group_id"].tolist() for batch in flow._parts.actor.trained] == [
        [0, 0],
        [1, 1],
    ] * 2
    assert engine_of(flow).versions == [1, 2, 3]
    assert flow._parts.ledger.counts()["used"] == 4
    assert flow._now.metrics["actor/updates"] == 2
    assert "actor/early_stop" not in flow._now.metrics
    assert flow._parts.actor.passes == []


def test_weights_that_have_not_moved_are_not_sent(tmp_path):
    flow = make_flow(tmp_path)
    flow.sync_weights()
    flow.sync_weights()
    assert engine_of(flow).versions == [1]


def test_while_the_critic_warms_up_it_alone_is_trained_and_prompts_count_as_used(tmp_path):
    value_objective = ValueObjectiveSpec(loss_aggregation=AGGREGATION)
    flow = make_flow(tmp_path, critic=Group(), plan={"value_objective": value_objective})
    counts = attrs.evolve(flow._parts.plan.counts, critic_warmup_steps=1)
    flow._parts = attrs.evolve(flow._parts, plan=attrs.evolve(flow._parts.plan, counts=counts))
    with flow.running():
        flow.sync_weights()
        one_step(flow)
        assert flow._now.metrics["actor/updates"] == 0
        assert (flow._parts.actor.trained, engine_of(flow).versions) == ([], [1])
        one_step(flow)
    assert flow._now.metrics["actor/updates"] == 2
    assert engine_of(flow).versions == [1, 2]
    [first, second] = flow._parts.critic.trained
    assert len(first) == len(second) == 4
    assert "values" in first
    assert flow._parts.ledger.counts()["used"] == 4


def test_a_step_that_filters_emptied_counts_and_warns(tmp_path):
    algorithm = AlgorithmSection(gate=GateSection(every=0), max_generation_rounds=2)
    flow = make_flow(tmp_path, filters={"nothing": made(Nothing)}, algorithm=algorithm)
    run(flow, 1)
    assert flow.step == 1
    assert flow._parts.actor.trained == []
    assert engine_of(flow).versions == [1]
    assert flow._parts.ledger.counts()["dropped"] == {"filter:nothing": 4}
    assert flow._now.metrics["filter/generated_prompts"] == 4
    assert any("no group is left" in warning for warning in flow._parts.logger.warnings)
    lines = (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["filtered"] for line in lines] == ["nothing"] * 8
    flow._parts.ledger.check()


def test_early_stopping_is_reported(tmp_path):
    flow = make_flow(tmp_path, actor=Group(script=[0.5]), training=ActorSection(max_kl=0.1))
    run(flow, 1)
    assert flow._now.metrics["actor/early_stop"] == 1
    assert flow._now.metrics["actor/updates"] == 1


@pytest.mark.parametrize(("good", "saved"), [(0, True), (1, False)])
def test_an_engine_that_refuses_a_mini_batch_leaves_a_file_and_whole_steps_saved(
    tmp_path, good, saved
):
    """Nothing was changed before the step's first update; after it the weights are half a step's."""
    fault = NumericsError("the loss is nan", sample_ids=["train.e0.p2.a0.s1"])
    flow = make_flow(tmp_path, actor=Group(script=[0.0, 0.0, *[0.0] * good, fault]))
    with pytest.raises(NumericsError, match=r"faults/step_2\.json"):
        run(flow, 2)
    file = json.loads((tmp_path / "run" / "faults" / "step_2.json").read_text())
    assert file["samples"][0]["response"] == "2"
    assert flow.step == 1
    assert flow._parts.store.has(1) == saved


def test_columns_that_are_not_finite_stop_the_step_before_any_update(tmp_path):
    flow = make_flow(
        tmp_path,
        actor=Group(output=np.nan),
        plan={"actor_outputs": frozenset({"log_probs"})},
    )
    with pytest.raises(NumericsError, match="old_log_probs is not finite in 4 of 4 samples"):
        run(flow, 1)
    assert flow._parts.actor.trained == []
    assert flow._parts.ledger.counts()["used"] == 0
    assert len(flow._parts.ledger.open()) == 2  # to be generated again


GATED = {"gate_log_probs": ("rollout_log_probs", "raw_rollout_log_probs")}


def test_the_gate_asks_for_log_probs_when_it_is_due_and_leaves_no_column(tmp_path):
    gate = AlgorithmSection(gate=GateSection(every=3, samples=3))
    flow = make_flow(tmp_path, plan=GATED, algorithm=gate)
    run(flow, 3)
    asked = [request.sampling.log_probs for request in engine_of(flow).requests]
    assert asked == [True] * 2 + [False] * 2 + [True] * 2
    assert asked == [request.sampling.raw_log_probs for request in engine_of(flow).requests]
    assert flow._parts.actor.passes == [(3, frozenset({"log_probs"}))] * 2
    assert flow._now.metrics["gate/prob_diff_mean"] == 0
    assert not any("rollout_log_probs" in batch for batch in flow._parts.actor.trained)


def test_the_gate_measures_every_step_where_both_sides_are_there_anyway(tmp_path):
    plan = GATED | {"rollout_log_probs": True, "actor_outputs": frozenset({"log_probs"})}
    flow = make_flow(tmp_path, plan=plan)
    run(flow, 2)
    assert flow._now.metrics["gate/tokens"] == 6
    assert flow._parts.actor.passes == [(4, frozenset({"log_probs"}))] * 2
    assert all("rollout_log_probs" in batch for batch in flow._parts.actor.trained)


def test_a_gate_that_stops_changes_nothing_and_names_its_samples(tmp_path):
    gate = AlgorithmSection(gate=GateSection(every=1, stop_above=0.1))
    flow = make_flow(tmp_path, plan=GATED, algorithm=gate, actor=Group(output=-2.0))
    with pytest.raises(NumericsError, match=r"stop_above.*faults/step_1\.json"):
        run(flow, 1)
    assert flow._parts.actor.trained == []
    assert len(flow._parts.ledger.open()) == 2


def test_a_gate_that_warns_lets_the_step_go_on(tmp_path):
    gate = AlgorithmSection(gate=GateSection(every=1, warn_above=0.01, stop_above=None))
    flow = make_flow(tmp_path, plan=GATED, algorithm=gate, actor=Group(output=-2.0))
    run(flow, 1)
    assert flow.step == 1
    assert any("warn_above" in warning for warning in flow._parts.logger.warnings)


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_kl_controller_learns_of_steps_that_count_alone(tmp_path, abandoned):
    section = KlInRewardSection(coef=0.5, controller=PluginSection(name="adaptive"))
    controller = made(AdaptiveKl, AdaptiveKlConfig(name="adaptive", target=0.1, horizon=8))
    flow = make_flow(
        tmp_path,
        actor=Group(output=-1.0),
        ref=Group(output=-2.0),
        kl_controllers={"in_reward": controller},
        algorithm=AlgorithmSection(gate=GateSection(every=0), kl=KlSection(in_reward=section)),
        plan={"actor_outputs": frozenset({"log_probs"})},
    )
    if abandoned:
        estimate = flow.estimate_advantages

        def stop_after(batch: Batch) -> Batch:
            done = estimate(batch)
            flow._stop.request("a test")
            flow._stop.check()
            return done

        flow.estimate_advantages = stop_after  # type: ignore[method-assign]
        with pytest.raises(StopRequested):
            run(flow, 1)
        assert controller.value == 1.0
        return
    run(flow, 1)
    assert controller.value == pytest.approx(1 + 0.2 * 4 / 8)
    assert flow._now.metrics["reward/kl_penalty"] == pytest.approx(1.0)
    assert flow._now.metrics["reward/kl_coef"] == 0.5
