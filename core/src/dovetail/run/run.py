"""One run from a config file to its summary: check, plan, build, train, report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.load import LoadedConfig, load_config
from dovetail.config.serialise import dump_yaml
from dovetail.errors import CheckpointError, ConfigError, DovetailError, RunDirectoryError
from dovetail.interfaces.plugin import Logger
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.source import PlannedPart
from dovetail.interfaces.source_data import SourceData
from dovetail.planning.plan import Plan
from dovetail.planning.stage_list import PlannedStage
from dovetail.plugins import lock
from dovetail.plugins.exit_guard import guard_exit
from dovetail.plugins.lock_differences import compare
from dovetail.run.build import build
from dovetail.run.checkpoints import with_earlier_seconds, with_streaming_of
from dovetail.run.data import load_data, plan_from_data
from dovetail.run.examination import enforce
from dovetail.run.interrupt import StopSwitch
from dovetail.run.requeue import (
    changes_of,
    checkpoint_at,
    fetch_copy,
    is_finished,
    newest_whole,
    refuse_another_run,
    summary_of,
)
from dovetail.run.training_run import TrainingRun
from dovetail.sections import RunConfig
from dovetail.telemetry.logging import close_logging, setup_logging
from dovetail.telemetry.numbers import write_seconds
from dovetail.telemetry.run_directory import RunDirectory, already_taken

Announce = Callable[[LoadedConfig, Plan, Path], None]
"""A function called with the config, the plan and the run directory, before anything heavy starts."""
Say = Callable[[str], None]
"""A function called with a line about how an existing run is continued, and about its end if no console tracker shows it."""


@attrs.frozen
class _Extras:
    """What the caller of a run passes besides its config; see `train`."""

    announce: Announce | None
    reward: Callable[..., Any] | None
    stop: StopSwitch | None
    say: Say


def _silent(_line: str) -> None:
    """Ignore a line: the default of `say`."""


def train(
    config: str | Path | LoadedConfig,
    overrides: Sequence[str] = (),
    announce: Announce | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    stop: StopSwitch | None = None,
    accept_changes: bool = False,
    say: Say = _silent,
) -> dict[str, Any]:
    """Train and return the summary; a run already begun in the run directory is continued as `trainer.resume` says.

    Args:
        config: a file, or a loaded config.
        overrides: `key=value` strings, if `config` is a file.
        announce: a function called with the config, the plan and the run directory, before anything heavy starts.
        reward: a function that scores every row, if the config names no function.
        stop: the switch that requests a stop; by default a new one.
        accept_changes: whether to continue the run even if its model, data, algorithm or reward differ from this config.
        say: a function called with lines of text, for example on how an existing run is continued; see `Say`.

    Raises:
        DovetailError: the run can't start or has failed; raised before the first step where possible.
        StopRequested: the run was stopped and saved.
    """
    guard_exit()
    extras = _Extras(announce, reward, stop, say)
    loaded = config if isinstance(config, LoadedConfig) else load_config(config, overrides)
    path = RunDirectory.path_for(loaded.config)
    if loaded.config.trainer.resume != "never":
        fetch_copy(path, loaded, say, accept_changes=accept_changes)
    if loaded.config.trainer.resume == "never" or not RunDirectory.begun(path):
        RunDirectory.check_free(path)
        return _begin(loaded, extras)
    directory = RunDirectory.open(path)
    with directory.held():
        changes = changes_of(directory, loaded)
        if not accept_changes:
            refuse_another_run(path, changes)
        finished = is_finished(directory)
        if finished and not changes:
            say(f"the run in {path} is finished; experiment=NAME starts another run")
            return summary_of(directory)
        checkpoint = newest_whole(directory, say)
        if checkpoint is not None or not finished:
            _say_changes(changes, say)
            checkpoint = checkpoint or checkpoint_at(loaded.config.trainer.resume)
            if checkpoint is None:
                say(f"{path} holds no checkpoint: the run starts from the beginning")
            return _continue(directory, loaded, checkpoint, extras)
    raise already_taken(path)


def _begin(loaded: LoadedConfig, extras: _Extras) -> dict[str, Any]:
    """Begin a new run: from its first step, or from the checkpoint of another run, if `trainer.resume` names one."""
    settings = loaded.config
    source = checkpoint_at(settings.trainer.resume)
    data = load_data(with_streaming_of(source, settings))
    plan = plan_from_data(settings, data)
    if source is not None:
        _check_steps_are_left(source, plan)
    if extras.announce is not None:
        extras.announce(loaded, plan, RunDirectory.path_for(settings))
    directory = RunDirectory.create(RunDirectory.path_for(settings))
    with directory.held():
        run = None
        try:
            logger = setup_logging(directory)
            enforce(loaded, plan, logger)
            _write_identity(directory, loaded, plan, data)
            directory.name_bad_rows(data.bad, logger)
            run = build(
                settings, data, plan, directory, logger, reward=extras.reward, stop=extras.stop
            )
            if source is not None:
                extras.say(f"{directory.path}: {run.restore(source)}")
        except BaseException:
            if run is not None:
                run.close()
            # Nothing has run yet, and a claimed directory would make the next attempt fail.
            close_logging()
            shutil.rmtree(directory.path, ignore_errors=True)
            raise
        return _run(run, extras.say)


def resume(
    run_directory: str | Path,
    overrides: Sequence[str] = (),
    announce: Announce | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    stop: StopSwitch | None = None,
    say: Say = _silent,
) -> dict[str, Any]:
    """Continue a run from its latest checkpoint and return the summary. For `reward`, `stop` and `say` see `train`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        DovetailError: a plugin of the run now comes from another distribution, or has another interface.
    """
    guard_exit()
    extras = _Extras(announce, reward, stop, say)
    directory = RunDirectory.open(Path(run_directory))
    with directory.held():
        store = CheckpointStore(directory.checkpoints)
        store.recover()
        checkpoint = store.latest()
        if checkpoint is None:
            raise CheckpointError(
                f"{directory.path} holds no checkpoint to resume from",
                hint="start the run again with the `dovetail train` command that began it",
            )
        loaded = load_config(directory.config, overrides)
        _say_changes(changes_of(directory, loaded), say)
        return _continue(directory, loaded, checkpoint, extras)


def _continue(
    directory: RunDirectory, loaded: LoadedConfig, checkpoint: Path | None, extras: _Extras
) -> dict[str, Any]:
    """Continue a run, in a directory that this process holds, from a checkpoint or from the beginning."""
    with ExitStack() as ending:
        ending.callback(close_logging)
        data = load_data(with_streaming_of(checkpoint, loaded.config))
        plan = plan_from_data(loaded.config, data)
        if checkpoint is not None:
            _check_something_is_left(directory, checkpoint, plan)
        logger = setup_logging(directory)
        if checkpoint is not None:
            _check_lock(directory, lock_of(loaded.config, plan, data), logger)
        enforce(loaded, plan, logger)
        if extras.announce is not None:
            extras.announce(loaded, plan, directory.path)
        run = build(
            loaded.config, data, plan, directory, logger, reward=extras.reward, stop=extras.stop
        )
        try:
            if checkpoint is not None:
                extras.say(f"{directory.path}: {run.restore(checkpoint)}")
                run.record.state = with_earlier_seconds(run.record.state, directory)
            if directory.summary.exists():
                # If this process is killed, the earlier summary must not say that the run completed.
                earlier = {"steps": run.position.step, **summary_of(directory)}
                directory.write_json(
                    "summary.json", {**earlier, "status": "running", "model": None}
                )
                _set_aside(directory.final, earlier["steps"], logger)
            # −1 also removes what a validation before the first step logged.
            directory.rewind(-1 if checkpoint is None else run.position.step)
            for change in changes_of(directory, loaded).values():
                logger.info("setting changed", step=run.position.step, detail=change)
            # The next resume continues with this config.
            _write_identity(directory, loaded, plan, data)
            directory.name_bad_rows(data.bad, logger)
        except BaseException:
            run.close()
            raise
        return _run(run, extras.say)


def _say_changes(changes: Mapping[str, str], say: Say) -> None:
    for change in changes.values():
        say(f"changed: {change}")


def _check_steps_are_left(source: Path, plan: Plan) -> None:
    done, steps = int(source.name.removeprefix("step_")), plan.counts.steps
    if steps is not None and done >= steps:
        raise ConfigError(
            f"there is nothing to do: the checkpoint {source} is already at step {done}, and the run has only {steps} steps",
            hint=f"set trainer.total_steps={2 * done}",
        )


def _set_aside(final: Path, step: int | None, logger: Logger) -> None:
    """Rename `final/`, the model that the run wrote when it ended at `step`, to `final_step_N`, so that the continued run can write it."""
    if final.exists():
        kept = final.with_name(f"{final.name}_step_{step}")
        if kept.is_dir():
            shutil.rmtree(kept)
        final.rename(kept)
        logger.warning(
            "the run continues: its earlier final model is kept", step=step, path=str(kept)
        )


def _check_something_is_left(directory: RunDirectory, checkpoint: Path, plan: Plan) -> None:
    done, steps = int(checkpoint.name.removeprefix("step_")), plan.counts.steps
    if is_finished(directory) and steps is not None and done >= steps:
        raise ConfigError(
            f"there is nothing left to do: {done} steps are done, and the run has {steps}",
            hint=f"continue with `dovetail resume {directory.path} trainer.total_steps={2 * done}`, start another run with "
            f"experiment=NAME, or export its model: `dovetail export {directory.path} DIRECTORY`",
        )


def _write_identity(
    directory: RunDirectory, loaded: LoadedConfig, plan: Plan, data: SourceData | None
) -> None:
    text = dump_yaml(loaded.config, loaded.from_environment, loaded.given)
    directory.write_text("config.yaml", text)
    directory.write_json("plugins.lock.json", lock_of(loaded.config, plan, data))
    directory.write_json("plan.json", describe(plan))


def lock_of(config: RunConfig, plan: Plan, data: SourceData | None) -> dict[str, Any]:
    """Return the plugin lock of a run: every plugin with distribution, version and content.

    Args:
        config: the config, with the environments of roles.
        plan: the plan, with the plugins.
        data: the data, whose rows may select plugins, such as reward functions by `data_source`; None leaves these plugins out.
    """
    found: list[PluginRef] = []
    if data is not None:
        source = plan.facts.plugins["source"]
        found += source.cls.named_by_rows(source.config, plan.facts, data)
    return lock.lock_for([*_used(plan), *found], config.runtime.environments)


def _used(plan: Plan) -> list[PluginRef]:
    """Return the selected plugins that the run uses.

    Omitted are plugins of roles without a model, the estimator if no stage computes advantages, and the policy loss and its aggregation if
    `actor.objective` selects an objective.
    """
    there = {model.role for model in plan.models}
    without = [f"{role}." for role in plan.facts.config.role_sections if role not in there]
    without += [] if plan.has_stage("advantage") else ["algorithm.advantage"]
    if plan.facts.config.actor.objective is not None:
        without += ["algorithm.policy_loss", "algorithm.loss_aggregation"]
    return [ref for path, ref in plan.refs.items() if not path.startswith(tuple(without))]


def _run(run: TrainingRun, say: Say) -> dict[str, Any]:
    with ExitStack() as ending:
        ending.callback(close_logging)
        ending.callback(run.close)
        ending.callback(_wind_up, run)
        ending.callback(run.runtime.before_exit)
        run.train()
    record = run.record
    if all(tracker.name != "console" for tracker in record.config.tracking):
        steps = f"{record.state.step} of {record.total_steps} steps"
        seconds = write_seconds(record.state.train_seconds)
        say(f"{record.directory.path}: completed, {steps} in {seconds}")
    return record.summary()


def _wind_up(run: TrainingRun) -> None:
    """Write the summary and notify observers; a failed write must not hide how the run ended."""
    record = run.record
    summary = record.summary()
    try:
        record.directory.write_json("summary.json", summary)
    except OSError as error:
        record.logger.warning("summary.json could not be written", error=repr(error))
    record.hooks.run_finished(summary=summary)


def _check_lock(directory: RunDirectory, now: dict[str, Any], logger: Logger) -> None:
    try:
        warnings, refusals = compare(directory.read_json("plugins.lock.json"), now)
    except (RunDirectoryError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"the file {directory.path / 'plugins.lock.json'} can't be read; it lists the plugins with which the run began",
            hint=f"restore it, or continue as another run: dovetail train {directory.config} experiment=NAME "
            f"trainer.resume={directory.path}",
        ) from error
    for warning in warnings:
        logger.warning("plugin_changed", detail=warning)
    if refusals:
        raise DovetailError(
            "the plugins of this run have changed since it was started: " + "; ".join(refusals),
            hint="install the versions in plugins.lock.json, or start a new run",
        )


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain containers, for `--json` and for the run directory."""
    return {
        "collection": [_part(part) for part in plan.collection],
        "stages": [
            {
                **_part(stage),
                "phase": stage.phase,
                "reads": dict(stage.reads),
                "rewrites": sorted(stage.rewrites),
            }
            for stage in plan.stages
        ],
        "publication": plan.publication and _part(plan.publication),
        "models": [
            {
                **attrs.asdict(
                    m,
                    filter=lambda a, _: a.name not in {"engine", "mesh", "objective", "training"},
                ),
                "trained": m.trained,
                "engine": m.engine.name,
                "objective": m.objective and m.objective.plugin.name,
                "mesh": {axis: size for axis, size in m.mesh.axes.items() if size > 1},
            }
            for m in plan.models
        ],
        "placement": {
            "runtime": plan.placement.runtime,
            "pools": [attrs.asdict(pool) for pool in plan.placement.pools],
            **attrs.asdict(plan.placement.source, filter=lambda a, _: a.name == "replicas"),
        },
        "counts": dict(plan.counts.rows()),
        "key_figures": plan.key_figures,
    }


def _part(part: PlannedPart | PlannedStage) -> dict[str, Any]:
    return {
        "name": part.name,
        "who": part.who,
        "because": part.because,
        "provides": sorted(part.provides),
    }
