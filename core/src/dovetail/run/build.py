"""Construction of a run's parts and plugins from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import DovetailError
from dovetail.hooks import Observers
from dovetail.interfaces.plugin import Logger, Plugin, PluginContext
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.runtime import PluginRef, Runtime, WorkerSpec
from dovetail.interfaces.source import ExperienceSource, Site
from dovetail.interfaces.source_data import SourceData
from dovetail.interfaces.stage import Stage
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.plugins.load import make_plugin
from dovetail.random_streams import torch_seeded
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.checkpoints import RunCheckpoints, RunState
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.data import make_loader
from dovetail.run.interrupt import StopSwitch
from dovetail.run.learner import Learner
from dovetail.run.measuring import Measuring
from dovetail.run.profile import StepProfile, check_profile
from dovetail.run.record import RunRecord
from dovetail.run.second_place import CheckpointCopies, SecondPlace
from dovetail.run.starting import start_roles
from dovetail.run.training_run import TrainingRun
from dovetail.sections import RunConfig
from dovetail.telemetry.run_directory import RunDirectory
from dovetail.workers.determinism import deterministic_kernels
from dovetail.workers.offload import OffloadManager


def build(
    config: RunConfig,
    data: SourceData,
    plan: Plan,
    run_directory: RunDirectory,
    logger: Logger,
    *,
    reward: Callable[..., Any] | None = None,
    stop: StopSwitch | None = None,
) -> TrainingRun:
    """Make and start every part of a run, and return the run; started parts are closed again if a later part fails.

    Args:
        config: the config of the run.
        data: tokenizer and prompts.
        plan: the run's plan.
        run_directory: the run directory.
        logger: a logger with the standard methods.
        reward: a function that scores every row, if the config names no function.
        stop: the switch that requests a stop; by default a new one.
    """
    context = PluginContext(
        seed=config.seed,
        run_directory=run_directory.path,
        tokenizer=data.tokenizer,
        model=config.model,
        logger=logger,
    )
    _examine(plan, data, reward, logger)
    # Trackers are made before anything heavy starts, so that a missing library is reported at once.
    trackers = _made(plan.refs, context, "tracking[")
    with ExitStack() as started:
        if config.trainer.deterministic:
            started.enter_context(deterministic_kernels())
        started.enter_context(torch_seeded(config.seed, "run"))
        parts = _start(config, data, plan, context, trackers, reward, started)
        record = _record(parts, run_directory, stop or StopSwitch())
        offload_manager = OffloadManager(
            {m.role: parts.groups[m.role] for m in plan.models if m.training.offload},
            record.phase,
            generates=parts.source.follows,
            beside=parts.groups,
        )
        started.callback(parts.source.close)  # closes before the loader and the observers
        parts.source.open(_site(parts, record, data, offload_manager))
        return _run(parts, record, offload_manager, started.pop_all())


@attrs.frozen(kw_only=True, eq=False)
class _Parts:
    """The started parts of a run."""

    config: RunConfig
    plan: Plan
    runtime: Any
    source: Any
    groups: dict[str, Any]
    """Worker groups, by role."""
    plugins: dict[str, Any]
    """Plugins on the controller that stages run, by key path."""
    stages: list[Stage]
    observers: Observers
    trainer: Any
    loader: PromptLoader
    ledger: Ledger
    logger: Logger
    weights: ActorWeights = attrs.field(factory=ActorWeights)


def _examine(
    plan: Plan, data: SourceData, reward: Callable[..., Any] | None, logger: Logger
) -> None:
    """Let the source and the stages check the data: log their warnings, and raise the first error."""
    source = plan.facts.plugins["source"]
    of_source = source.cls.examine(source.config, plan.facts, data, reward)
    of_stages = (each for _, found in plan.examined(data) for each in found)
    for found in chain(of_source, of_stages):
        if isinstance(found, DovetailError):
            raise found
        if isinstance(found, Finding):
            logger.warning(found.message)


def _start(
    config: RunConfig,
    data: SourceData,
    plan: Plan,
    context: PluginContext,
    trackers: Mapping[str, Any],
    reward: Callable[..., Any] | None,
    started: ExitStack,
) -> _Parts:
    """Make and start the plugins of a run, each after those that it needs."""
    runtime: Any = make_plugin(plan.refs["runtime"], context)
    started.callback(runtime.close)
    runtime.start()
    runtime.place(plan.placement.pools)
    source: Any = make_plugin(plan.refs["source"], attrs.evolve(context, runtime=runtime))
    started.callback(source.close)
    groups = _started_roles(config, plan, context, runtime, source, reward)
    source.start()
    plugins = _plugins_of_stages(plan, context)
    stages = _stages(plan, attrs.evolve(context, runtime=runtime), started)
    observers = _observers(trackers, context.logger, started)
    for name, observer in source.observers.items():
        observers.add(observer, name)
    if (url := config.trainer.copy_to) is not None:
        folder = RunDirectory(Path(str(context.run_directory)))
        place = SecondPlace(url, folder.name)
        copies = CheckpointCopies(place, CheckpointStore(folder.checkpoints), context.logger)
        observers.add(copies, "checkpoint_copies")
    trainer = make_plugin(plan.refs["trainer"], context)
    sampler: Any = make_plugin(plan.refs["data.sampler"], context)
    loader, ledger = make_loader(config, data, sampler)
    started.callback(loader.close)
    return _Parts(
        config=config,
        plan=plan,
        runtime=runtime,
        source=source,
        groups=groups,
        plugins=plugins,
        stages=stages,
        observers=observers,
        trainer=trainer,
        loader=loader,
        ledger=ledger,
        logger=context.logger,
    )


def _record(parts: _Parts, directory: RunDirectory, stop: StopSwitch) -> RunRecord:
    """Make the run's record, whose checkpoints contain the state of every part."""
    config, plan = parts.config, parts.plan
    checkpoints = RunCheckpoints(
        store=CheckpointStore(
            directory.checkpoints,
            keep=config.trainer.keep_checkpoints,
            every=config.trainer.keep_every,
        ),
        groups={model.role: parts.groups[model.role] for model in plan.models if model.moves},
        loader=parts.loader,
        ledger=parts.ledger,
        plugins={
            "source": parts.source,
            "trainer": parts.trainer,
            **parts.source.parts,
            **parts.plugins,
            **{f"stages.{stage.name}": stage for stage in parts.stages},
        },
        asynchronous=config.trainer.async_save,
        expected_bytes=plan.checkpoint_bytes(),
    )
    checkpoints.keep("actor_weights", parts.weights)
    steps, logger = plan.counts.steps, parts.logger
    return RunRecord(
        config=config,
        plan=plan,
        state=RunState(),
        directory=directory,
        checkpoints=checkpoints,
        loader=parts.loader,
        hooks=parts.observers.hook,
        logger=logger,
        profile=StepProfile(config, parts.groups, directory.path, steps=steps, logger=logger),
        stop=stop,
        accuracy=parts.source.summary,
    )


def _run(
    parts: _Parts, record: RunRecord, offload_manager: OffloadManager, started: ExitStack
) -> TrainingRun:
    """Assemble the run from its parts."""
    constant = ConstantColumns(parts.plan, parts.stages, record.directory.path / "constant_columns")
    learner = Learner(
        record,
        parts.stages,
        offload_manager=offload_manager,
        weights=parts.weights,
        source=parts.source,
        constant=constant,
    )
    measuring = Measuring(
        record=record,
        groups=parts.groups,
        stages=parts.stages,
        plugins=parts.plugins,
        offload_manager=offload_manager,
        constant=constant,
    )
    return TrainingRun(
        record=record,
        source=parts.source,
        weights=parts.weights,
        learner=learner,
        measuring=measuring,
        checkpoints=record.checkpoints,
        loader=parts.loader,
        trainer=parts.trainer,
        roles=parts.groups,
        plugins=parts.plugins,
        runtime=parts.runtime,
        started=started,
    )


def _site(
    parts: _Parts, record: RunRecord, data: SourceData, offload_manager: OffloadManager
) -> Site:
    """Return the parts of the run that the run's experience source uses."""
    return Site(
        config=parts.config,
        plan=parts.plan,
        data=data,
        loader=parts.loader,
        ledger=parts.ledger,
        runtime=parts.runtime,
        actor=parts.groups["actor"],
        weights=parts.weights,
        offloading=offload_manager,
        phase=record.phase,
        metrics=lambda: record.metrics,
        finished=lambda: record.state.step,
        check_stop=record.stop.check,
        hooks=record.hooks,
        directory=record.directory,
        logger=parts.logger,
    )


def _started_roles(
    config: RunConfig,
    plan: Plan,
    context: PluginContext,
    runtime: Runtime,
    source: ExperienceSource,
    reward: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Start the training workers together with the source's processes; return the worker groups by role."""
    directory = context.run_directory
    assert directory is not None

    def train() -> dict[str, Any]:
        groups = {
            model.role: _worker_group(runtime, model, config, plan, context)
            for model in plan.models
        }
        check_profile(config, groups, directory)
        return groups

    groups, _ = start_roles(
        plan,
        directory,
        train=train,
        generate=lambda: source.launch(plan, reward),
        logger=context.logger,
    )
    return groups


def _stages(plan: Plan, context: PluginContext, started: ExitStack) -> list[Stage]:
    stages: list[Any] = [make_plugin(stage.ref, context) for stage in plan.stages]
    for stage in stages:
        started.callback(stage.close)
        stage.start()
    return stages


def _observers(trackers: Mapping[str, Any], logger: Logger, started: ExitStack) -> Observers:
    """Return the run's observers, including its trackers, which are started."""
    observers = Observers(logger)
    for tracker in trackers.values():
        name = observers.add(tracker, f"{tracker.name} (tracker)")
        started.callback(observers.guarded(name, "close", tracker.close))
        observers.guarded(name, "start", tracker.start)()
    # pluggy calls the observer that was added last first: the report is written before the console tracker prints its path.
    observers.load()
    return observers


def _plugins_of_stages(plan: Plan, context: PluginContext) -> dict[str, Any]:
    """Make the plugins that stages run on the controller: advantage estimator, rollout correction and KL controllers, by key path."""
    paths = ["algorithm.advantage"]
    if plan.has_stage("rollout_correction"):
        paths.append("algorithm.rollout_correction")
    paths += [f"algorithm.kl.{place}.controller" for place in ("in_loss", "in_reward")]
    return {path: make_plugin(plan.refs[path], context) for path in paths if path in plan.refs}


def _made(refs: Mapping[str, PluginRef], context: PluginContext, prefix: str) -> dict[str, Plugin]:
    """Make the plugins whose key paths begin with `prefix`, such as `tracking[`; return them by key path, in the config's order."""
    return {p: make_plugin(ref, context) for p, ref in refs.items() if p.startswith(prefix)}


def _worker_group(
    runtime: Runtime, model: ModelRole, config: RunConfig, plan: Plan, context: PluginContext
) -> Any:
    spec = WorkerSpec(
        role=model.role,
        plugin=model.engine,
        context=attrs.evolve(
            context,
            role=model.role,
            model=config.model_section(model.role),
            head=model.head,
            trained=model.moves,
            training=model.training,
            total_steps=plan.total_updates(model.role),
        ),
        # Only the actor's weights are sent to the rollout.
        transport=plan.refs.get("rollout.weight_transport") if model.role == "actor" else None,
    )
    return runtime.worker_group(spec, model.mesh)
