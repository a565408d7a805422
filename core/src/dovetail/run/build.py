"""Builds the parts of a run from its config: the one place where plugins are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.data.loading import Data
from dovetail.errors import DovetailError
from dovetail.hooks import Observers
from dovetail.interfaces.plugin import Logger, Plugin, PluginContext
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.runtime import PluginRef, Runtime, WorkerSpec
from dovetail.interfaces.source import ExperienceSource, Site
from dovetail.interfaces.stage import Stage
from dovetail.planning.memory import checkpoint_bytes
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
from dovetail.run.learning_warnings import LearningWarnings
from dovetail.run.measuring import Measuring
from dovetail.run.profile import StepProfile, check_profile
from dovetail.run.record import RunRecord
from dovetail.run.starting import start_roles
from dovetail.run.training_run import TrainingRun
from dovetail.sections import ModelSection, RunConfig
from dovetail.telemetry.run_directory import RunDirectory
from dovetail.workers.offload import OffloadManager


def build(
    config: RunConfig,
    data: Data,
    plan: Plan,
    run_directory: RunDirectory,
    logger: Logger,
    *,
    reward: Callable[..., Any] | None = None,
    stop: StopSwitch | None = None,
) -> TrainingRun:
    """Make and start every part of a run; what was started is closed again if a later part fails.

    Args:
        config: of the run.
        data: tokenizer and prompts.
        plan: made from both.
        run_directory: where the run writes.
        logger: with the standard methods.
        reward: scores every row, where the config names no function.
        stop: what asks for a stop; one of the run's own where absent.
    """
    context = PluginContext(
        seed=config.seed,
        run_directory=run_directory.path,
        tokenizer=data.tokenizer,
        model=config.model,
        logger=logger,
    )
    given = plan.facts.plugins["source"]
    for found in given.cls.examine(given.config, plan.facts, data, reward):
        if isinstance(found, DovetailError):
            raise found
        if isinstance(found, Finding):
            logger.warning(found.message)
    # Before anything heavy starts: a tracker whose library is missing is found now.
    trackers = _made(plan.refs, context, "tracking[")
    with ExitStack() as started:
        if config.trainer.deterministic:
            _deterministic(started)
        started.enter_context(torch_seeded(config.seed, "run"))
        runtime: Any = make_plugin(plan.refs["runtime"], context)
        started.callback(runtime.close)
        runtime.start()
        runtime.place(plan.placement.pools)
        source: Any = make_plugin(plan.refs["source"], attrs.evolve(context, runtime=runtime))
        started.callback(source.close)
        groups = _started_roles(config, plan, run_directory, context, runtime, source, reward)
        source.start()
        plugins = _plugins_of_stages(plan, context)
        stages = _stages(plan, context, started)
        observers = _observers(trackers, logger, started)
        trainer: Any = make_plugin(plan.refs["trainer"], context)
        loader, ledger = make_loader(config, data, _sampler(plan, context))
        started.callback(loader.close)
        weights = ActorWeights()
        checkpoints = RunCheckpoints(
            CheckpointStore(run_directory.checkpoints, keep=config.trainer.keep_checkpoints),
            groups={model.role: groups[model.role] for model in plan.models if model.moves},
            loader=loader,
            ledger=ledger,
            plugins={
                "source": source,
                "trainer": trainer,
                **source.parts,
                **plugins,
                **{f"stages.{stage.name}": stage for stage in stages},
            },
            asynchronous=config.trainer.async_save,
            expected_bytes=checkpoint_bytes(config, plan),
        )
        checkpoints.keep("actor_weights", weights)
        record = RunRecord(
            config=config,
            plan=plan,
            state=RunState(),
            directory=run_directory,
            checkpoints=checkpoints,
            loader=loader,
            observers=observers,
            logger=logger,
            profile=StepProfile(
                config, groups, run_directory.path, steps=plan.counts.steps, logger=logger
            ),
            stop=stop or StopSwitch(),
            accuracy=source.summary,
        )
        offload_manager = OffloadManager(
            {m.role: groups[m.role] for m in plan.models if m.training.offload},
            record.phase,
            generates=source.follows,
        )
        started.callback(source.close)  # before what the loader and the observers hold
        source.open(
            site_of(
                record,
                data,
                loader=loader,
                ledger=ledger,
                runtime=runtime,
                actor=groups["actor"],
                weights=weights,
                offload_manager=offload_manager,
            )
        )
        constant = ConstantColumns(plan, stages, run_directory.path / "constant_columns")
        return TrainingRun(
            record=record,
            source=source,
            weights=weights,
            learner=Learner(
                record,
                stages,
                offload_manager=offload_manager,
                weights=weights,
                source=source,
                constant=constant,
            ),
            measuring=Measuring(
                record,
                groups=groups,
                stages=stages,
                plugins=plugins,
                offload_manager=offload_manager,
                constant=constant,
            ),
            checkpoints=checkpoints,
            loader=loader,
            trainer=trainer,
            roles=groups,
            plugins=plugins,
            runtime=runtime,
            started=started.pop_all(),
        )


def site_of(
    record: RunRecord,
    data: Data,
    *,
    loader: PromptLoader,
    ledger: Ledger,
    runtime: Runtime,
    actor: Any,
    weights: ActorWeights,
    offload_manager: OffloadManager,
) -> Site:
    """Return what a run gives its source."""
    return Site(
        config=record.config,
        plan=record.plan,
        data=data,
        loader=loader,
        ledger=ledger,
        runtime=runtime,
        actor=actor,
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


def _started_roles(
    config: RunConfig,
    plan: Plan,
    run_directory: RunDirectory,
    context: PluginContext,
    runtime: Runtime,
    source: ExperienceSource,
    reward: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Worker groups by role, started beside what the source launches."""

    def train() -> dict[str, Any]:
        groups = {
            model.role: _worker_group(runtime, model, config, plan, context)
            for model in plan.models
        }
        check_profile(config, groups, run_directory.path)
        return groups

    groups, _ = start_roles(
        config,
        plan,
        run_directory.path,
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
    """The observers of a run, its trackers among them, started."""
    observers = Observers(logger)
    for tracker in trackers.values():
        name = observers.add(tracker, f"{tracker.name} (tracker)")
        started.callback(observers.guarded(name, "close", tracker.close))
        observers.guarded(name, "start", tracker.start)()
    # The latest is called first: the console's last words come after the report, which they name.
    observers.load()
    observers.add(LearningWarnings(logger), "learning_warnings")
    return observers


def _sampler(plan: Plan, context: PluginContext) -> Any:
    return make_plugin(plan.refs["data.sampler"], context)


def _plugins_of_stages(plan: Plan, context: PluginContext) -> dict[str, Any]:
    """The plugins on the controller that core's stages run, by key path."""
    paths = ["algorithm.advantage"]
    if plan.has_stage("rollout_correction"):
        paths.append("algorithm.rollout_correction")
    paths += [f"algorithm.kl.{place}.controller" for place in ("in_loss", "in_reward")]
    return {path: make_plugin(plan.refs[path], context) for path in paths if path in plan.refs}


def _made(refs: Mapping[str, PluginRef], context: PluginContext, prefix: str) -> dict[str, Plugin]:
    """The plugins of a list in the config, by key path, in its order."""
    return {p: make_plugin(ref, context) for p, ref in refs.items() if p.startswith(prefix)}


def _deterministic(started: ExitStack) -> None:
    """Have torch refuse kernels that differ from run to run, until the run is closed."""
    import torch

    # cuBLAS reads it when its first handle is made (docs.nvidia.com/cuda/cublas, reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started.callback(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
    )
    torch.use_deterministic_algorithms(True)


def _worker_group(
    runtime: Runtime, model: ModelRole, config: RunConfig, plan: Plan, context: PluginContext
) -> Any:
    model_section: ModelSection = attrs.evolve(config.model, path=model.path)
    spec = WorkerSpec(
        role=model.role,
        plugin=model.engine,
        context=attrs.evolve(
            context,
            role=model.role,
            model=model_section,
            head=model.head,
            trained=model.moves,
            training=model.training,
            total_steps=plan.total_updates(model.role),
        ),
        # The weights of the other roles go nowhere.
        transport=plan.refs.get("rollout.weight_transport") if model.role == "actor" else None,
    )
    return runtime.worker_group(spec, model.mesh)
