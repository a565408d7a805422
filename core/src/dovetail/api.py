"""Dovetail from Python: `dovetail.train`, `resume`, `plan` and `check`, in a script or a notebook."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import DataError

if TYPE_CHECKING:
    from dovetail.config.load import LoadedConfig
    from dovetail.planning.plan import Plan
    from dovetail.run.examination import Examination
    from dovetail.run.interrupt import StopSwitch
    from dovetail.sections import RunConfig

Config = str | Path | Sequence[str | Path] | Mapping[str, Any]
"""Config of a run: the path of a YAML file, several paths (later files win), an empty sequence if `overrides` gives
every key, or nested mappings."""
Rows = Iterable[Mapping[str, Any]]
"""Rows as in a dataset file: `prompt`, and the columns that the reward reads (`data_source`, `reward_model`, `extra_info`)."""
Reward = Callable[..., Any]
"""A function that scores the responses to every row, with the parameters and the result of `RewardFunction.compute_score`."""


def train(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    reward: Reward | None = None,
    dataset: Rows | None = None,
    val_dataset: Rows | None = None,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Train and return the summary, as `dovetail train` does. The same call again continues a stopped or killed run.

    On Ctrl-C (or a notebook's stop button), generation ends, a running stage completes, and the run is saved.

    Args:
        config: the config of the run.
        overrides: `key=value` strings, as on the command line.
        reward: a function that scores every row, in place of the functions of the config.
        dataset: training rows, in place of `data.train_files`. The rows are written to `output_dir`, so that the command line can resume
            the run.
        val_dataset: held-out rows, in place of `data.val_files`.
        accept_changes: whether to continue a run that began with another model, data, algorithm or reward.

    Returns:
        The content of `summary.json`: `status`, `steps`, `accuracy_before`, `accuracy_after`, `directory`, …

    Raises:
        DovetailError: the run can't start or has failed; raised before the first step where possible.
        StopRequested: the run was stopped and saved.
    """
    from dovetail.run.run import train as run

    loaded = _load(config, overrides, reward, dataset, val_dataset)
    return _outside_event_loops(
        lambda stop: run(
            loaded,
            announce=_warn,
            reward=reward,
            stop=stop,
            accept_changes=accept_changes,
            say=print,
        )
    )


def resume(
    run_directory: str | Path, overrides: Sequence[str] = (), *, reward: Reward | None = None
) -> dict[str, Any]:
    """Continue a run from its latest checkpoint and return the summary, as `dovetail resume` does.

    Args:
        run_directory: the run directory.
        overrides: `key=value` strings, kept in the run's config.
        reward: the function that was passed to `train`, if any.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        DovetailError: the config, the data, or a plugin is wrong.
        StopRequested: the run was stopped and saved.
    """
    from dovetail.run.run import resume as run

    return _outside_event_loops(
        lambda stop: run(run_directory, overrides, _warn, reward=reward, stop=stop, say=print)
    )


def plan(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    dataset: Rows | None = None,
    val_dataset: Rows | None = None,
) -> dict[str, Any]:
    """Return the plan of a run as plain containers: stages, models, placement, and counts such as the number of steps.

    Args:
        config: the config of the run.
        overrides: `key=value` strings.
        dataset: training rows, in place of `data.train_files`.
        val_dataset: held-out rows, in place of `data.val_files`.

    Raises:
        DovetailError: a plugin's requirement is unmet, the numbers of rows, steps or ranks contradict each other, or data can't be read.
    """
    from dovetail.run.data import load_data, plan_from_data
    from dovetail.run.run import describe

    loaded = _load(config, overrides, None, dataset, val_dataset)
    return describe(plan_from_data(loaded.config, load_data(loaded.config)))


def check(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    reward: Reward | None = None,
    dataset: Rows | None = None,
    val_dataset: Rows | None = None,
) -> Examination:
    """Return all problems that can be found before a run, as `dovetail check` lists them.

    Args:
        config: the config of the run.
        overrides: `key=value` strings.
        reward: a function that scores every row, in place of the functions of the config.
        dataset: training rows, in place of `data.train_files`.
        val_dataset: held-out rows, in place of `data.val_files`.

    Returns:
        `errors`, `warnings` and `notes`; an error has `message`, `hint` and the `rule` that found the error.

    Raises:
        ConfigError: the config itself is wrong; `problems` lists every problem.
    """
    from dovetail.run.examination import examine

    return examine(_load(config, overrides, reward, dataset, val_dataset), reward=reward)


def _load(
    config: Config,
    overrides: Sequence[str],
    reward: Reward | None,
    dataset: Rows | None,
    val_dataset: Rows | None,
) -> LoadedConfig:
    """Load the config, with `reward` and the datasets in place of those that the config names."""
    from dovetail.config.load import config_from_mapping, load_config

    def load(*more: str) -> LoadedConfig:
        if isinstance(config, Mapping):
            return config_from_mapping(config, [*overrides, *more], name="config")
        return load_config(config, [*overrides, *more])

    given = [] if reward is None else ["reward.function=null", "reward.functions={}"]
    settings = load().config
    for key, rows in (("train_files", dataset), ("val_files", val_dataset)):
        if rows is not None:
            given.append(f"data.{key}={_written(rows, settings, key)}")
            given += ["data.mixture={}"] if key == "train_files" else []
    return load(*given)


def _written(rows: Rows, config: RunConfig, what: str) -> Path:
    """Write rows to a file in the config's dataset format, and return the path; `what` is the key below `data`, for errors."""
    from dovetail.plugins.load import load_plugin_class, ref_for

    section = config.data.source
    source: Any = load_plugin_class(ref_for("dataset", section))
    try:
        path: Path = source.write(section, rows, Path(config.output_dir) / "datasets")
    except DataError as error:
        raise DataError(f"data.{what}: {error.message}", hint=error.hint) from error
    return path


def _outside_event_loops(run: Callable[[StopSwitch], dict[str, Any]]) -> dict[str, Any]:
    """Call `run` in this thread, or in a new one if this thread already runs an event loop, as a notebook's does.

    Generation starts an event loop, which a thread that already runs one does not allow.
    """
    from dovetail.run.interrupt import StopSwitch

    stop = StopSwitch()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(stop)
    # Python runs signal handlers in the main thread only: `stop` is set in this thread, and read by the run in the other.
    with stop, ThreadPoolExecutor(1, thread_name_prefix="dovetail") as thread:
        running = thread.submit(run, stop)
        while not running.done():
            # Python handles a signal that another thread received only once this thread wakes.
            wait([running], timeout=0.5)
        return running.result()


def _warn(loaded: LoadedConfig, plan: Plan, _: Path) -> None:
    """Issue a Python warning for each warning that `dovetail train` prints."""
    from dovetail.run.examination import rule_findings

    found = [f for f in rule_findings(loaded.config, plan) if f.severity == "warning"]
    if loaded.config.trainer.run_restarts:
        warnings.warn(
            "trainer.run_restarts works only on the command line: this call raises an infrastructure error instead of restarting the run",
            stacklevel=2,
        )
    for message in (*loaded.warnings, *map(str, found)):
        warnings.warn(str(message), stacklevel=2)
