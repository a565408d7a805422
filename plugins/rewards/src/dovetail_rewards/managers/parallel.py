"""`parallel`: reward functions in worker processes, which a time-out kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from typing import ClassVar

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    RewardCall,
    RewardFunctions,
    RunningTime,
    Sample,
)
from dovetail_rewards.manager_config import ParallelConfig
from dovetail_rewards.managers.function_manager import FunctionManager, require_functions
from dovetail_rewards.managers.keeper import Keeper
from dovetail_rewards.managers.wire import arguments_of
from dovetail_rewards.managers.worker_process import Job


class ParallelManager(FunctionManager):
    """Scores in processes of their own: what a function does there stops nobody else.

    Each process is a fresh interpreter that makes the functions for itself, by name or from their file, and calls
    them in its main thread, so that rules that use signals (math-verify) work. `reward.timeout` counts from when
    a sample is really worked on, and kills the process; a crash fails the sample that was worked on, as
    `crash`, retryable. Other samples that the process had are scored by another. What workers send back is
    JSON and is never unpickled. Processes end with the manager, and with this process however it ends.
    """

    name: ClassVar[str] = "parallel"
    aliases: ClassVar[tuple[str, ...]] = ("prime",)
    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"timeout", "async_functions", "processes"})
    queues: ClassVar[bool] = True
    Config: ClassVar[type[ParallelConfig]] = ParallelConfig

    def __init__(self, config: ParallelConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._keeper: Keeper | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        return self._keeper.pids if self._keeper is not None else []

    def start(self) -> None:
        """Start the workers, and wait until they have made their functions.

        Raises:
            ConfigError: there are no functions, or they can't be made in another process.
            RewardError: a worker could not start.
        """
        functions = require_functions(self.name, self.context)
        self._keeper = Keeper(
            workers=self.config.workers or cores(),
            chunk=self.config.chunk,
            setup=_setup(functions),
            start_timeout=self.config.start_timeout,
            log=self.context.logger.warning,
        )
        problem = self._keeper.start()
        if problem is not None:
            self.close()
            raise RewardError(
                f"reward manager 'parallel': {problem}",
                hint="the functions must load by name or from their file in a fresh process; or raise "
                "reward.manager.start_timeout",
            )

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        if self._keeper is None:
            message = "reward manager 'parallel' is not started"
            return Failure(kind=FailureKind.CRASH, message=message)
        try:
            pickled = pickle.dumps(arguments_of(sample, call.fields))
        except Exception as error:  # noqa: BLE001 - whatever a row holds
            message = f"the row can't be sent to a worker process: {type(error).__name__}: {error}"
            return Failure(kind=FailureKind.EXCEPTION, message=message)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Outcome] = loop.create_future()

        def answer(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and with it who waits
                loop.call_soon_threadsafe(_settle, answered, outcome)

        job = Job(sample=pickled, limit=time.limit, answer=answer, name=call.name)
        self._keeper.submit(job)
        try:
            with time.waiting():  # the keeper sees to the limit, from when the sample is worked on
                return await answered
        finally:
            if not answered.done() or answered.cancelled():
                self._keeper.cancel(job)

    def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _settle(answered: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not answered.done():
        answered.set_result(outcome)


def _setup(functions: RewardFunctions) -> bytes:
    """What a worker makes the functions from.

    Raises:
        ConfigError: they can't be named in another process.
    """
    try:
        return pickle.dumps((functions.files(), pickle.dumps(functions)))
    except Exception as error:
        raise ConfigError(
            "reward manager 'parallel' makes the reward functions again in each worker process, and one of them "
            f"can't be named there: {type(error).__name__}: {error}",
            hint="put it at the top level of a file and set reward.function={path: my_reward.py, "
            "attribute: compute_score}; or set reward.manager.name=naive",
        ) from error
