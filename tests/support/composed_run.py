"""A run composed of the real parts over scripted workers: what surrounds a step is real, models are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config import config_from_mapping
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.dispatch import Future
from dovetail.hooks import Observers, hookimpl
from dovetail.interfaces import (
    AgentLoop,
    PluginContext,
    Prompt,
    RewardManager,
    Score,
    Site,
    TrainEngine,
    Trainer,
    WeightManifest,
)
from dovetail.metrics import Last
from dovetail.planning.plan import Plan, make_plan
from dovetail.plugins.load import make_plugin
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.build import _plugins_of_stages
from dovetail.run.checkpoints import RunCheckpoints, RunState
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.interrupt import StopSwitch
from dovetail.run.learner import Learner
from dovetail.run.measuring import Measuring
from dovetail.run.profile import StepProfile
from dovetail.run.record import RunRecord
from dovetail.run.training_run import TrainingRun
from dovetail.sections import PluginSection, TrainerSection
from dovetail.telemetry import RunDirectory
from dovetail.workers.offload import OffloadManager
from dovetail_datasets.samplers import SequentialSampler
from dovetail_rollouts import Episodes, RolloutPool, RolloutsSource
from dovetail_rollouts.validation import Accuracy
from dovetail_sdk.testing import temporary_plugins
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine

BASE = {
    "model": {"path": "nowhere"},
    "data": {"train_batch_size": 2, "max_response_length": 5},
    "rollout": {"name": "scripted", "n": 2, "weight_check": {"every": 0}},
    "actor": {"engine": "table", "mini_batch_size": 1},
    "critic": {"mini_batch_size": 2},
    # A loss without a ratio: nothing requires old log-probabilities unless a test does.
    "algorithm": {"policy_loss": "reinforce", "logprob_check": {"every": 0}},
}


class Scripted(ScriptedRollout):
    """Says that it has log-probabilities, and that it can sleep; its completions have them where they are asked for."""

    capabilities = frozenset({"logprobs", "raw_logprobs", "sleep"})


class Table(TableEngine):
    """Says that it can train a critic."""

    capabilities = frozenset({"deterministic", "value_head"})

    @classmethod
    def outputs(cls, config: Any, head: Any) -> Any:
        return TrainEngine.outputs(config, head)


class Group:
    """A worker group: its forward passes give one constant, its updates report or raise what a script says."""

    def __init__(self, output: float = 0.0, script: Any = ()) -> None:
        self.output = output
        self.script = list(script)
        self.passes: list[tuple[int, frozenset[str]]] = []
        self.trained: list[Batch] = []
        self.asked_at: list[int] = []
        """After how many updates it was asked for its memory."""
        self.sent: list[int] = []

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Future[Batch]:
        self.passes.append((len(batch), outputs))
        mask = batch["response_mask"]
        values = mask.with_values(np.full(len(mask.values), self.output, np.float32))
        return Future.completed(Batch(dict.fromkeys(outputs, values)))

    def memory(self) -> Future[Any]:
        self.asked_at.append(len(self.trained))
        return Future.completed([{"rss_bytes": 2.0}, {"rss_bytes": 1.0}])

    def update(self, mini_batch: Batch, objective: Any) -> Future[Any]:
        happens = self.script.pop(0) if self.script else 0.0
        if isinstance(happens, Exception):
            return Future.failed(happens)
        self.trained.append(mini_batch)
        return Future.completed({"actor/approx_kl": Last(happens)})

    def export(self, directory: Path) -> Future[None]:
        directory.mkdir()
        return Future.completed(None)

    def weight_manifest(self, version: int) -> Future[WeightManifest]:
        return Future.completed(WeightManifest(version=version, tensors=()))

    def send_weights(self, version: int, manifest: WeightManifest) -> Future[None]:
        self.sent.append(version)
        return Future.completed(None)

    def save(self, directory: Path) -> Future[None]:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(str(len(self.trained)))
        return Future.completed(None)

    def begin_save(self, directory: Path) -> Future[None]:
        return self.save(directory)

    def finish_save(self) -> Future[None]:
        return Future.completed(None)

    def load(self, directory: Path) -> Future[None]:
        self.loaded = (directory / "weights").read_text()
        return Future.completed(None)


class Manager(RewardManager):
    """1 for a response of odd length."""

    name = "parity"
    api = ">=1.0,<2"

    async def score(self, samples: Any, time: Any) -> list[Any]:
        return [Score(value=float(sample.response_length % 2)) for sample in samples]


class Nothing(Trainer):
    """Returns at once."""

    name = "nothing"
    api = ">=2.0,<3"
    Config = TrainerSection

    def run(self, run: Any) -> None: ...


class Logger:
    """Remembers its warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(event)


class Events:
    """An observer that notes stages and updates.

    Attributes:
        stages: names of those that ran, in order.
        updates: metrics of each step's updates.
        after: called with the name of each stage that is finished.
    """

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.updates: list[dict[str, float]] = []
        self.after: Callable[[str], object] = lambda stage: None

    @hookimpl
    def stage_finished(self, stage: str) -> None:
        self.stages.append(stage)
        self.after(stage)

    @hookimpl
    def update_finished(self, metrics: Mapping[str, float]) -> None:
        self.updates.append(dict(metrics))


def plain(cls: Any, config: Any = None) -> Any:
    """A plugin with its defaults."""
    return cls(config or PluginSection(name=cls.name), PluginContext())


class Tokenizer:
    """A letter is a token; tokens read as their number."""

    all_special_ids = all_special_tokens = ()

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def decode(self, ids: Any, **_: Any) -> str:
        return str(len(ids))


class OfScripts(RolloutsSource):
    """The source `rollouts` over replicas and a manager that are given."""

    def bring(self, pool: Any, manager: Any, episodes: Any, filters: Mapping[str, Any]) -> None:
        self._started, self._pool, self._manager = ExitStack(), pool, manager
        self._episodes, self._filters = episodes, filters
        self._accuracy = Accuracy(self.context.logger)

    def _answer(self, site: Any) -> None:
        """No process asks: what waits for one would move a simulated clock."""


def driven_by(trainer: Trainer, plan: Plan) -> Plan:
    """The plan of a run with this trainer."""
    known = plan.facts.plugins["trainer"]
    selected = attrs.evolve(known, cls=type(trainer), config=trainer.config)
    facts = attrs.evolve(plan.facts, plugins={**plan.facts.plugins, "trainer": selected})
    return attrs.evolve(plan, facts=facts)


class Composed:
    """A run of three steps over six prompts: two prompts a step, with two samples each, and an optimizer step a prompt.

    Attributes:
        run: what a trainer drives.
        roles: worker groups by role.
        engines: the rollout replicas; `engine` is the first.
        pool: of these.
        manager: what scores.
        stop: what asks for a stop.
        metrics: of the latest step.
    """

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        trainer: type[Trainer] = Nothing,
        filters: Mapping[str, Any] | None = None,
        replicas: int = 1,
        restart: Callable[[Any], Any] | None = None,
        agent_loop: AgentLoop | None = None,
        **groups: Group,
    ) -> None:
        config = config_from_mapping(BASE, overrides).config
        driver = plain(trainer, TrainerSection(name=trainer.name))
        self.plan: Plan = driven_by(driver, make_plan(config, prompts=6))
        self.roles = {model.role: Group() for model in self.plan.models} | groups
        script = Script(answer=lambda _, sample: [1] * (sample + 1))
        self.engines = [Scripted.following(script) for _ in range(replicas)]
        self.engine = self.engines[0]
        self.logger, self.events, self.stop = Logger(), Events(), StopSwitch()
        self.ledger = Ledger()
        prompts = [Prompt(index=i, prompt_ids=np.arange(2), raw=str(i)) for i in range(6)]
        sampler = plain(SequentialSampler, PluginSection())
        loader = PromptLoader(prompts, sampler, 2, self.ledger)
        run_directory = RunDirectory.create(directory / "run")
        self.store = CheckpointStore(run_directory.checkpoints)
        context, logger, roles = PluginContext(), self.logger, dict[str, Any](self.roles)
        plugins = _plugins_of_stages(self.plan, context)
        stages: list[Any] = [make_plugin(stage.ref, context) for stage in self.plan.stages]
        checkpoints = RunCheckpoints(
            store=self.store,
            groups=self.roles,
            loader=loader,
            ledger=self.ledger,
            plugins={**plugins, "trainer": driver},
            asynchronous=config.trainer.async_save,
        )
        self.observers = observers = Observers()
        observers.add(self.events)
        weights = ActorWeights()
        checkpoints.keep("actor_weights", weights)
        record = RunRecord(
            config=config,
            plan=self.plan,
            state=RunState(),
            directory=run_directory,
            checkpoints=checkpoints,
            loader=loader,
            hooks=observers.hook,
            logger=logger,
            profile=StepProfile(config, roles, run_directory.path, steps=3, logger=logger),
            stop=self.stop,
            accuracy=dict,
        )
        offload_manager = OffloadManager({}, record.phase)
        self.pool = pool = RolloutPool(self.engines, restart=restart)
        self.manager = manager = plain(Manager)
        tokenizer: Any = Tokenizer()
        source = OfScripts(PluginSection(name="rollouts"), PluginContext(tokenizer=tokenizer))
        source.bring(
            pool,
            manager,
            None if agent_loop is None else Episodes(agent_loop, tokenizer),
            filters or {},
        )
        self.close = source.close
        runtime: Any = None
        data: Any = SimpleNamespace(train=SimpleNamespace(prompts=prompts), val=None)
        source.open(
            Site(
                config=record.config,
                plan=record.plan,
                data=data,
                loader=loader,
                ledger=self.ledger,
                runtime=runtime,
                actor=roles["actor"],
                weights=weights,
                offloading=offload_manager,
                phase=record.phase,
                metrics=lambda: record.metrics,
                finished=lambda: record.state.step,
                check_stop=record.stop.check,
                hooks=record.hooks,
                directory=record.directory,
                logger=record.logger,
            )
        )
        checkpoints.keep("source", source)
        constant = ConstantColumns(self.plan, stages, directory / "constant_columns")
        self.run = TrainingRun(
            record=record,
            source=source,
            learner=Learner(
                record,
                stages,
                offload_manager=offload_manager,
                weights=weights,
                source=source,
                constant=constant,
            ),
            weights=weights,
            measuring=Measuring(
                record=record,
                groups=roles,
                stages=stages,
                plugins=plugins,
                offload_manager=offload_manager,
                constant=constant,
            ),
            checkpoints=checkpoints,
            loader=loader,
            trainer=driver,
            roles=roles,
            plugins=plugins,
            runtime=runtime,
            started=ExitStack(),
        )

    @property
    def metrics(self) -> dict[str, float]:
        return self.run.record.metrics

    def step(self) -> None:
        """Collect, learn, publish."""
        with self.run.step() as step:
            self.run.collect(step)
            self.run.learn(step)
            self.run.publish_weights()

    def take(self, steps: int) -> None:
        """Publish, and take so many steps."""
        with self.run.record.running():
            self.run.publish_weights()
            for _ in range(steps):
                self.step()


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Callable[..., Composed]]:
    """A function that makes a `Composed` run from overrides of its config, and groups by role."""
    with temporary_plugins(Scripted, Table), ExitStack() as made:

        def one(*overrides: str, directory: str = "", **given: Any) -> Composed:
            composed = Composed(tmp_path / directory, *overrides, **given)
            made.callback(composed.close)
            return composed

        yield one


@pytest.fixture(scope="session")
def worker_group() -> type[Group]:
    """The class `Group`."""
    return Group
