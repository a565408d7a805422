"""One run from a config file to its summary: check, plan, build, train, report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.config import LoadedConfig, dump_yaml, load_config
from dovetail.errors import CheckpointError, DovetailError
from dovetail.flow.build import Parts, build, load_data, plan_from_data, run_path
from dovetail.flow.flow import Flow
from dovetail.flow.plan import Plan
from dovetail.flow.state import RunState, restore_checkpoint
from dovetail.plugins import lock

if TYPE_CHECKING:
    from dovetail.telemetry import RunDirectory

Announce = Callable[[LoadedConfig, Plan, Path], None]
"""Called with what is about to run, before anything heavy starts."""


def train(
    config_path: str | Path, overrides: Sequence[str] = (), announce: Announce | None = None
) -> dict[str, Any]:
    """Train from the start and return the summary.

    Raises:
        DovetailError: whatever is wrong, before the first step where it can be known by then.
        StopRequested: the run was stopped and saved.
    """
    from dovetail.telemetry import RunDirectory, setup_logging
    from dovetail.telemetry.logging import close_logging

    loaded = load_config(config_path, overrides)
    config = loaded.config
    data = load_data(config)
    plan = plan_from_data(config, data)
    if announce is not None:
        announce(loaded, plan, run_path(config))
    directory = RunDirectory.create(run_path(config))
    try:
        logger = setup_logging(directory)
        directory.write_text("config.yaml", dump_yaml(config))
        directory.write_json("plugins.lock.json", lock.lock_for(plan.refs.values()))
        parts = build(config, data, plan, directory, logger)
    except BaseException:
        # Nothing has run yet: a directory left behind would only stand in the way of the next try.
        close_logging()
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return _run(parts, RunState())


def resume(
    run_directory: str | Path, overrides: Sequence[str] = (), announce: Announce | None = None
) -> dict[str, Any]:
    """Continue a run from its latest checkpoint and return the summary.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        DovetailError: a plugin of the run is now of another distribution or interface.
    """
    from dovetail.checkpoint.store import CheckpointStore
    from dovetail.telemetry import RunDirectory, setup_logging

    directory = RunDirectory.open(Path(run_directory))
    checkpoint = CheckpointStore(directory.checkpoints).latest()
    if checkpoint is None:
        raise CheckpointError(
            f"{directory.path} holds no checkpoint to resume from",
            hint="start it again with `dovetail train`, under another experiment name",
        )
    loaded = load_config(directory.path / "config.yaml", overrides)
    data = load_data(loaded.config)
    plan = plan_from_data(loaded.config, data)
    logger = setup_logging(directory)
    _check_lock(directory, plan, logger)
    if announce is not None:
        announce(loaded, plan, directory.path)
    parts = build(loaded.config, data, plan, directory, logger)
    try:
        state = restore_checkpoint(parts, checkpoint)
        directory.rewind(state.step)
    except BaseException:
        parts.close()
        raise
    return _run(parts, state)


def _run(parts: Parts, state: RunState) -> dict[str, Any]:
    from dovetail.interfaces import make_plugin
    from dovetail.interfaces.plugin import PluginContext
    from dovetail.telemetry import write_report
    from dovetail.telemetry.logging import close_logging

    trainer: Any = make_plugin(
        parts.plan.refs["trainer"],
        PluginContext(
            seed=parts.config.seed,
            run_directory=parts.run_directory.path,
            logger=parts.logger,
        ),
    )
    flow = Flow(parts, state)
    directory = parts.run_directory
    try:
        trainer.run(flow)
    finally:
        summary = flow.summary()
        directory.write_json("summary.json", summary)
        report = write_report(directory.path)
        shown = {**summary, "report": str(report), "next_commands": _next_commands(parts, summary)}
        parts.trackers.finish(shown)
        parts.close()
        close_logging()
    return summary


def _next_commands(parts: Parts, summary: dict[str, Any]) -> list[str]:
    path, dovetail = parts.run_directory.path, _command()
    if summary["status"] != "completed":
        commands = [f"resume {path}", f"config show {path}/config.yaml", "doctor"]
    else:
        commands = [
            f"plan {path}/config.yaml",
            f"train {path}/config.yaml experiment=rloo algorithm.advantage=rloo",
            "plugins list",
        ]
    return [f"{dovetail} {command}" for command in commands]


def _command() -> str:
    """What to type for `dovetail` here: its path, where the environment has not been activated."""
    script = Path(sys.executable).with_name("dovetail")
    found = shutil.which("dovetail")
    if (found is not None and Path(found).samefile(script)) or not script.exists():
        return "dovetail"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def _check_lock(directory: RunDirectory, plan: Plan, logger: Any) -> None:
    warnings, refusals = lock.compare(
        directory.read_json("plugins.lock.json"), lock.lock_for(plan.refs.values())
    )
    for warning in warnings:
        logger.warning("plugin_changed", detail=warning)
    if refusals:
        raise DovetailError(
            "the plugins of this run have changed since it was started: " + "; ".join(refusals),
            hint="install the versions in plugins.lock.json, or start a new run",
        )


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as plain containers, for `--json` and for the run directory."""
    return {
        "stages": [
            {"name": s.name, "who": s.who, "because": s.because, "provides": sorted(s.provides)}
            for s in plan.stages
        ],
        "models": [
            {**attrs.asdict(m, filter=lambda a, _: a.name != "engine"), "engine": m.engine.name}
            for m in plan.models
        ],
        "counts": dict(plan.counts.rows()),
    }
