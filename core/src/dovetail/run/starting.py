"""Starting the roles of a run: training models first and then the rollout, or both at the same time if that is safe."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from dovetail.interfaces.plugin import Logger
from dovetail.planning.plan import Plan
from dovetail.sections.placement import Pool
from dovetail.workers.loading import loading_turn

Groups = TypeVar("Groups")
Replicas = TypeVar("Replicas")

_ROLLOUT = "rollout"


def starts_at_once(plan: Plan) -> bool:
    """Return whether the rollout may start while training models load.

    The experience source, the plugin that provides each step's samples, must allow this (`SourcePlacement.beside`). Rollout and training
    models must run in one process, where they take turns with the accelerator, or in separate pools of accelerators.
    """
    return bool(plan.placement.source.beside) and (plan.placement.in_process or _apart(plan))


def start_roles(
    plan: Plan,
    run_directory: Path,
    *,
    train: Callable[[], Groups],
    generate: Callable[[], Replicas],
    logger: Logger,
) -> tuple[Groups, Replicas]:
    """Start training models and rollout, and wait for both.

    If one fails, the other is still waited for, since only a started role can be closed. If both fail, the error of the training models is
    raised. In one process, a file lock lets rollout and training models take turns with the accelerator. On a file system without locks,
    the rollout starts after the training models.

    Args:
        plan: the plan of the run.
        run_directory: the run directory.
        train: the function that starts the training models.
        generate: the function that starts the rollout's replicas; called in another thread if both start at the same time.
        logger: the logger for a failure or Ctrl-C that has to wait, and for a file system without locks.

    Returns:
        The results of `train` and of `generate`.
    """
    if not starts_at_once(plan):
        return train(), generate()
    # Imported before the threads start: two threads that import the same packages at once can see partly initialised modules.
    for module in plan.placement.source.imports:
        with suppress(Exception):  # the engine's own start reports the error
            importlib.import_module(module)
    turn = nullcontext(enter_result=True) if _apart(plan) else loading_turn(run_directory)
    with ThreadPoolExecutor(1, thread_name_prefix="start-rollout") as thread:
        with turn as held:
            if not held:
                logger.warning(
                    f"the file system of {run_directory} has no locks: the rollout starts after the training models, "
                    "not at the same time"
                )
                return train(), generate()
            replicas = thread.submit(generate)
            with _telling_of(replicas, logger):
                groups = train()
        with _telling_of(replicas, logger):
            return groups, replicas.result()


@contextmanager
def _telling_of(replicas: Future[Any], logger: Logger) -> Iterator[None]:
    """Log an error or a Ctrl-C of the block at once if the rollout is still starting, since the error ends the run only after the start."""
    try:
        yield
    except BaseException as error:
        if not replicas.done():
            logger.warning(f"{type(error).__name__}: closing the rollout once it has started")
        raise


def _apart(plan: Plan) -> bool:
    """Return whether the rollout's pool holds no training model."""
    home: Pool = plan.placement.pool(_ROLLOUT)
    return not plan.placement.in_process and set(home.roles) == {_ROLLOUT}
