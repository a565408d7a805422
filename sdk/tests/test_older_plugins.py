"""Plugins as they were written for the first minor version of an interface that has grown: they pass every gate, their suites, and core's calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.errors import ConfigError, DataError, ModelError, PlanError, RolloutError
from dovetail.interfaces import (
    OUTPUTS,
    AdvantageEstimator,
    Advantages,
    AgentLoop,
    BaseRollout,
    DatasetSource,
    DispatchMode,
    Objective,
    ObjectiveTerm,
    ParsedTurn,
    PluginContext,
    PolicyLoss,
    RewardFunction,
    RewardManager,
    Runtime,
    SampleFilter,
    Sampler,
    Score,
    Stage,
    StageSet,
    TokenLosses,
    ToolParser,
    Tracker,
    Trainer,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail.plugins.contract import check_api, check_class, import_object
from dovetail.plugins.kinds import KINDS
from dovetail.sections import (
    EpisodeSection,
    ModelSection,
    PluginSection,
    RuntimeSection,
    TrainerSection,
)
from dovetail.workers import WorkerHost
from dovetail_datasets.examples_source import ExamplesSource
from dovetail_sdk.check.signatures import differences
from dovetail_sdk.testing.conformance import (
    AdvantageConformance,
    DispatchModeConformance,
    ObjectiveConformance,
    PolicyLossConformance,
    RewardFunctionConformance,
    RuntimeConformance,
    SampleFilterConformance,
    SamplerConformance,
)
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine
from dovetail_sdk.testing.transport_ends import case_tensors, manifest_of
from dovetail_stages import all_finite, on_device

OF_1_0 = {"name": "older", "api": ">=1.0,<2"}


class Estimator(AdvantageEstimator):
    name, api, scope, level = "older", ">=1.0,<2", "group", "sample"

    @classmethod
    def requires(cls, config):
        return frozenset({"scores"})

    def estimate(self, columns, groups):
        scores_N = columns["scores"].astype(np.float64)
        above_N = (scores_N - groups.mean_N(scores_N)) * (groups.sizes_G[groups.index_N] > 1)
        return Advantages(advantages=above_N.astype(np.float32))


class Loss(PolicyLoss):
    name, api = "older", ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"log_probs", "advantages"})

    def token_losses(self, inputs):
        return TokenLosses(losses_T=-inputs.columns["advantages"] * inputs.log_probs_T)


class Function(RewardFunction):
    name, api = "older", ">=1.0,<2"

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)


class Manager(RewardManager):
    name, api = "older", ">=1.0,<2"

    async def score(self, samples, time):
        return [Score(value=1.0) for _ in samples]


class Mode(DispatchMode):
    name, api = "older", ">=1.0,<2"

    def split(self, mesh, args, kwargs):
        return [(args, kwargs)] * mesh.size, None

    def collect(self, mesh, results, receipt):
        return list(results)


class Alone(Runtime):
    name, api, Config = "older", ">=1.0,<2", RuntimeSection

    def worker_group(self, spec, mesh):
        raise NotImplementedError

    def rollout_replicas(self, spec, count):
        return [
            WorkerHost("cpu").start(spec, BaseRollout, mesh=None, rank=rank)
            for rank in range(count)
        ]


class Carried(WeightTransport):
    name, api, held = "older", ">=1.0,<2", []

    def sender(self):
        return CarriedSender()

    def receiver(self):
        return CarriedReceiver()


class CarriedSender(WeightSender):
    def send(self, manifest, tensors):
        Carried.held[:] = [(name, tensor.clone()) for name, tensor in tensors]


class CarriedReceiver(WeightReceiver):
    def receive(self, manifest):
        yield from Carried.held


class Rows(DatasetSource):
    name, api = "older", ">=1.0,<2"

    def read(self, paths):
        return [{"prompt": text} for path in paths for text in Path(path).read_text().splitlines()]


class Backwards(Sampler):
    name, api = "older", ">=1.0,<2"

    def order(self, size, epoch):
        return np.arange(size, dtype=np.int64)[::-1].copy()


class Schedule(Trainer):
    name, api, Config = "older", ">=2.0,<3", TrainerSection

    def run(self, run):
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)


class Loop(AgentLoop):
    name, api, Config = "older", ">=1.0,<2", EpisodeSection

    async def run(self, session):
        await session.generate()


class Likelihood(Objective):
    name, api = "older", ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"response_mask"})

    @classmethod
    def outputs(cls, config):
        return (OUTPUTS["log_probs"],)

    def denominators(self, mini_batch, reduction):
        own = np.array([mini_batch["response_mask"].values.sum()], np.float64)
        return {"tokens": float(reduction.sum(own)[0])}

    def term(self, outputs, micro_batch, denominators, scalars):
        log_probs_T = outputs["log_probs"]
        mask_T = on_device(micro_batch["response_mask"].values, log_probs_T)
        log_probs_T = log_probs_T.masked_fill(~mask_T, 0)
        loss = -log_probs_T.sum() / (denominators["tokens"] or 1.0)
        finite = all_finite(loss, {"log_probs": log_probs_T})
        return ObjectiveTerm(loss=loss, metrics={}, finite=finite)


class Right(SampleFilter):
    name, api, action = "older", ">=1.0,<2", "mask"

    @classmethod
    def requires(cls, config):
        return frozenset({"scores"})

    def keep(self, columns, groups):
        return columns["scores"] > 0


class Clip(Stage):
    name, api, phase = "older", ">=1.0,<2", "transform"

    @classmethod
    def requires(cls, config, facts):
        return {"advantages": "stage 'older'"}

    @classmethod
    def rewrites(cls, config, facts):
        return frozenset({"advantages"})

    def run(self, batch, step):
        clipped = np.clip(batch["advantages"], -1, 1)
        return batch.with_columns({"advantages": clipped})


class Named(StageSet):
    name, api, stages = "older", ">=1.0,<2", ("update_actor",)


class Parser(ToolParser):
    name, api = "older", ">=1.0,<2"

    def parse(self, text, tools):
        return ParsedTurn(content=text)


class Lines(Tracker):
    name, api = "older", ">=1.0,<2"

    def metrics_logged(self, step, metrics):
        self.line = f"{step} {metrics}"


OLDER = {
    "advantage": Estimator,
    "agent_loop": Loop,
    "dataset": Rows,
    "dispatch_mode": Mode,
    "engine": TableEngine,
    "objective": Likelihood,
    "policy_loss": Loss,
    "reward_function": Function,
    "reward_manager": Manager,
    "rollout": type("Older", (ScriptedRollout,), OF_1_0),
    "runtime": Alone,
    "sample_filter": Right,
    "sampler": Backwards,
    "source": ExamplesSource,
    "stage": Clip,
    "stage_set": Named,
    "tool_parser": Parser,
    "tracker": Lines,
    "trainer": Schedule,
    "weight_transport": Carried,
}
"""Kind → a plugin that has what that version asked for, and nothing that came later."""


def test_every_interface_that_has_grown_has_a_plugin_of_before():
    grown = {name for name, kind in KINDS.items() if not kind.api.endswith(".0")}
    assert grown <= OLDER.keys(), f"write one for {', '.join(sorted(grown - OLDER.keys()))}"


@pytest.mark.parametrize("kind", OLDER)
def test_it_passes_every_gate(kind):
    cls, described = OLDER[kind], KINDS[kind]
    check_api(cls.api, described, cls.name)
    check_class(cls, described, cls.name)
    assert differences(cls, import_object(described.interface)) == []


def made(kind):
    cls = OLDER[kind]
    return cls(cls.Config(), PluginContext())


def test_what_came_later_has_an_answer_without_it(tmp_path: Path):
    manager, engine, runtime = made("reward_manager"), made("engine"), made("runtime")
    assert manager.needs_functions(manager.config)
    assert manager.selects(manager.config) == {}
    assert (manager.capacity, manager.queues, manager.sleep()) == (None, False, None)
    assert (engine.offload(), engine.onload()) == (None, None)
    assert runtime.place([]) is None
    with pytest.raises(ModelError, match="does not say which layers"):
        engine.shape(ModelSection(path="nowhere"))
    with pytest.raises(ConfigError, match="does not quantize"):
        engine.quantization("fp8")
    with pytest.raises(DataError, match="takes no rows of a program"):
        made("dataset").write(None, [{"prompt": "1+1="}], tmp_path)
    assert runtime.before_exit() is None
    with pytest.raises(RolloutError, match="does not start rollout replicas again"):
        runtime.restart_replica(OLDER["rollout"]())
    assert made("trainer").examples(TrainerSection()) == "prompts"
    assert (made("objective").trained_at, made("stage").changes_samples) == ("tokens", False)
    with pytest.raises(PlanError, match="older"):
        OLDER["stage_set"].measure(None, None, None, 0)
    assert (OLDER["tool_parser"].served_as, OLDER["tool_parser"].reasoning_as) == ({}, {})
    assert made("tracker").given_up(tmp_path, 1, None, "killed by SIGKILL") is None
    assert OLDER["sample_filter"].action_of(PluginSection()) == "mask"
    assert made("stage").constant(PluginSection(), None) == frozenset()
    assert made("policy_loss").prepares(PluginSection()) == frozenset()
    assert made("advantage").min_group_size(PluginSection()) <= 2


def test_a_transport_without_a_rendezvous_carries_an_update():
    transport, tensors = made("weight_transport"), case_tensors()
    sender, receiver = transport.sender(), transport.receiver()
    manifest = sender.prepare(manifest_of(tensors))
    assert manifest.rendezvous is None
    sender.send(manifest, iter(tensors.items()))
    for (name, tensor), spec in zip(receiver.receive(manifest), manifest.tensors, strict=True):
        assert name == spec.name
        assert torch.equal(tensor, tensors[name])


class TestAdvantage(AdvantageConformance):
    plugin = Estimator


class TestObjective(ObjectiveConformance):
    plugin = Likelihood
    config = PluginSection(name="older")


class TestPolicyLoss(PolicyLossConformance):
    plugin = Loss


class TestSampleFilter(SampleFilterConformance):
    plugin = Right


class TestRewardFunction(RewardFunctionConformance):
    plugin = Function
    right = (("a", "a"),)
    wrong = (("b", "a"),)


class TestDispatchMode(DispatchModeConformance):
    plugin = Mode


class TestRuntime(RuntimeConformance):
    plugin = Alone


class TestSampler(SamplerConformance):
    plugin = Backwards
