"""Builds the parts of a run from its config: the one place where plugins are made."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import ConfigError
from dovetail.experience.episodes import Episodes
from dovetail.experience.pool_commands import PoolCommands
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.rollout_service import RolloutService
from dovetail.hooks import Observers
from dovetail.interfaces.plugin import Logger, Plugin, PluginContext
from dovetail.interfaces.runtime import PluginRef, Runtime, WorkerSpec
from dovetail.planning.memory import checkpoint_bytes
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.plugins.load import make_plugin
from dovetail.random_streams import torch_seeded
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.added_replicas import adding_to
from dovetail.run.agent_loops import running_episodes
from dovetail.run.checkpoints import RunCheckpoints, RunState
from dovetail.run.collector import RolloutCollector
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.data import Data, make_loader
from dovetail.run.data_checks import check_labels
from dovetail.run.evaluator import Evaluator
from dovetail.run.example_collector import Closing, ExampleCollector
from dovetail.run.example_evaluator import ExampleEvaluator
from dovetail.run.interrupt import StopSwitch
from dovetail.run.learner import Learner
from dovetail.run.learning_warnings import LearningWarnings
from dovetail.run.pool_socket import served
from dovetail.run.profile import StepProfile, check_profile
from dovetail.run.publisher import WeightPublisher
from dovetail.run.record import RunRecord
from dovetail.run.starting import start_roles
from dovetail.run.training_run import TrainingRun
from dovetail.scoring.functions import configured_functions
from dovetail.scoring.rows import check_sources, unused_functions
from dovetail.scoring.scorer import Scorer
from dovetail.sections import EngineSection, ModelSection, RunConfig
from dovetail.stages.algorithm import staleness
from dovetail.telemetry.run_directory import RunDirectory
from dovetail.weights.offload import OffloadManager


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
    if reward is not None and not plan.generates:
        raise ConfigError(
            f"a reward function is given, and a run on {plan.counts.kind} of the dataset scores nothing",
            hint="leave it out",
        )
    refs = plan.refs
    functions = configured_functions(config.reward, PluginContext(seed=config.seed), given=reward)
    if plan.generates:
        check_sources(functions, data.prompts)
        for unused in unused_functions(config.reward, data.prompts) if reward is None else ():
            logger.warning(unused)
    context = PluginContext(
        seed=config.seed,
        run_directory=run_directory.path,
        tokenizer=data.tokenizer,
        model=config.model,
        logger=logger,
        reward_functions=functions,
    )
    # Before anything heavy starts: a tracker whose library is missing is found now.
    trackers = _made(refs, context, "tracking[")
    with ExitStack() as started:
        if config.trainer.deterministic:
            _deterministic(started)
        started.enter_context(torch_seeded(config.seed, "run"))
        runtime: Any = make_plugin(refs["runtime"], context)
        started.callback(runtime.close)
        runtime.start()
        runtime.place(plan.placement.pools)

        def train() -> dict[str, Any]:
            groups = {
                model.role: _worker_group(runtime, model, config, plan, context)
                for model in plan.models
            }
            check_profile(config, groups, run_directory.path)
            return groups

        pool: RolloutPool | None = None
        manager: Any = None
        episodes: Episodes | None = None
        if not plan.generates:
            groups = train()
        else:
            rollout = WorkerSpec(
                role="rollout",
                plugin=refs["rollout"],
                context=attrs.evolve(context, role="rollout", weights_follow=_whole_updates(plan)),
                transport=refs["rollout.weight_transport"],
            )
            groups, replicas = start_roles(
                config,
                plan,
                run_directory.path,
                train=train,
                generate=lambda: runtime.rollout_replicas(rollout, plan.placement.replicas),
                logger=logger,
            )
            episodes = started.enter_context(running_episodes(config, context, logger))
            pool = RolloutPool(
                replicas, restart=runtime.restart_replica, addresses=config.rollout.addresses
            )
            add = adding_to(rollout, runtime.device())
            started.callback(pool.close)
            manager = make_plugin(refs["reward.manager"], attrs.evolve(context, runtime=runtime))
            started.callback(manager.close)
            manager.start()
        plugins = _plugins_of_stages(plan, context)
        stages: list[Any] = [make_plugin(stage.ref, context) for stage in plan.stages]
        for stage in stages:
            started.callback(stage.close)
            stage.start()
        filters: Any = _by_name(_made(refs, context, "algorithm.sample_filters[").values())
        observers = Observers(logger)
        for tracker in trackers.values():
            name = observers.add(tracker, f"{tracker.name} (tracker)")
            started.callback(observers.guarded(name, "close", tracker.close))
            observers.guarded(name, "start", tracker.start)()
        # The latest is called first: the console's last words come after the report, which they name.
        observers.load()
        observers.add(LearningWarnings(logger), "learning_warnings")
        trainer: Any = make_plugin(refs["trainer"], context)
        sampler: Any = make_plugin(refs["data.sampler"], context)
        loader, ledger = make_loader(config, data, sampler)
        started.callback(loader.close)
        checkpoints = RunCheckpoints(
            CheckpointStore(run_directory.checkpoints, keep=config.trainer.keep_checkpoints),
            groups={model.role: groups[model.role] for model in plan.models if model.moves},
            loader=loader,
            ledger=ledger,
            plugins={
                "trainer": trainer,
                **({} if manager is None else {"reward.manager": manager}),
                **plugins,
                **{f"algorithm.sample_filters.{name}": kept for name, kept in filters.items()},
                **{f"stages.{stage.name}": stage for stage in stages},
            },
            asynchronous=config.trainer.async_save,
            expected_bytes=checkpoint_bytes(config, plan),
        )
        weights = ActorWeights()
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
        )
        held_out: Any = data.val.prompts if data.val else ()
        offload_manager = OffloadManager(
            _offloaded(plan, groups), record.phase, generates=pool is not None
        )
        constant: ConstantColumns | None = None
        if pool is None:
            constant = ConstantColumns(plan, stages, run_directory.path / "constant_columns")
            closing = Closing.of(plan.facts, data.tokenizer)
            check_labels([*data.train.one_of_each(), *held_out[:1]], plan.facts.required)
            parts: dict[str, Any] = {
                "service": None,
                "collector": ExampleCollector(
                    record, loader=loader, ledger=ledger, tokenizer=data.tokenizer, closing=closing
                ),
                "publisher": None,
                "evaluator": ExampleEvaluator(
                    record,
                    groups=groups,
                    stages=stages,
                    plugins=plugins,
                    offload_manager=offload_manager,
                    constant=constant,
                    examples=held_out,
                    closing=closing,
                    store=checkpoints.store,
                ),
            }
        else:
            parts = _generation(
                record,
                weights,
                data,
                groups["actor"],
                pool=pool,
                manager=manager,
                episodes=episodes,
                offload_manager=offload_manager,
                checkpoints=checkpoints,
                loader=loader,
                ledger=ledger,
                filters=filters,
                over_sampling=trainer.over_sampling(trainer.config) is not None,
            )
            checkpoints.keep("experience", parts["collector"])
            service = parts["service"]
            started.callback(service.close)
            started.enter_context(
                served(PoolCommands(pool, service, add), service, run_directory, logger)
            )
        return TrainingRun(
            **parts,
            record=record,
            weights=weights,
            learner=Learner(
                record,
                stages,
                offload_manager=offload_manager,
                weights=weights,
                ledger=ledger,
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


def _generation(
    record: RunRecord,
    weights: ActorWeights,
    data: Data,
    actor: Any,
    *,
    pool: RolloutPool,
    manager: Any,
    episodes: Episodes | None,
    offload_manager: OffloadManager,
    checkpoints: RunCheckpoints,
    loader: PromptLoader,
    ledger: Ledger,
    filters: Mapping[str, Any],
    over_sampling: bool,
) -> dict[str, Any]:
    """What generates and scores, and sends weights to where that is done."""
    config = record.config
    service = RolloutService(
        pool=pool,
        manager=manager,
        scorer=Scorer(
            manager,
            timeout=config.reward.timeout,
            retries=config.reward.retries,
            concurrency=config.reward.concurrency,
        ),
        tokenizer=data.tokenizer,
        seed=config.seed,
        episodes=episodes,
        partial=config.rollout.partial_rollout,
        keeps_cache=config.rollout.keep_cache,
        continues=staleness(record.plan.facts) > 0,
        check_stop=record.stop.check,
        stall_seconds=config.rollout.stall_seconds,
        logger=record.logger,
    )
    publisher = WeightPublisher(
        record,
        weights,
        actor=actor,
        service=service,
        pool=pool,
        offload_manager=offload_manager,
        prompts=data.train.prompts,
        tokenizer=data.tokenizer,
    )
    return {
        "service": service,
        "publisher": publisher,
        "collector": RolloutCollector(
            record,
            weights,
            publisher,
            service,
            pool=pool,
            tokenizer=data.tokenizer,
            whole=manager.unit == "group",
            loader=loader,
            ledger=ledger,
            filters=filters,
            max_staleness=staleness(record.plan.facts),
            over_sampling=over_sampling,
        ),
        "evaluator": Evaluator(
            record,
            publisher,
            service,
            pool=pool,
            prompts=data.val.prompts if data.val else (),
            store=checkpoints.store,
        ),
    }


def _offloaded(plan: Plan, groups: Mapping[str, Any]) -> dict[str, Any]:
    """The worker groups that keep off the accelerator while they do not compute, by role."""
    return {m.role: groups[m.role] for m in plan.models if m.training.offload}


def _plugins_of_stages(plan: Plan, context: PluginContext) -> dict[str, Any]:
    """The plugins on the controller that core's stages run, by key path."""
    paths = ["algorithm.advantage"]
    if plan.has_stage("rollout_correction"):
        paths.append("algorithm.rollout_correction")
    paths += [f"algorithm.kl.{place}.controller" for place in ("in_loss", "in_reward")]
    return {path: make_plugin(plan.refs[path], context) for path in paths if path in plan.refs}


def _whole_updates(plan: Plan) -> bool:
    """Whether the actor sends all of its weights, and not an adapter to what the rollout has read from disk."""
    engines: list[Any] = [model.engine.config for model in plan.models if model.role == "actor"]
    return all(isinstance(e, EngineSection) and e.weight_kind() == "full" for e in engines)


def _made(refs: Mapping[str, PluginRef], context: PluginContext, prefix: str) -> dict[str, Plugin]:
    """The plugins of a list in the config, by key path, in its order."""
    return {p: make_plugin(ref, context) for p, ref in refs.items() if p.startswith(prefix)}


def _by_name(plugins: Iterable[Any]) -> dict[str, Any]:
    """Plugins by name; the second of one name is called `name_2`, and so on."""
    named: dict[str, Any] = {}
    for plugin in plugins:
        names = (plugin.name if i == 1 else f"{plugin.name}_{i}" for i in itertools.count(1))
        named[next(name for name in names if name not in named)] = plugin
    return named


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
