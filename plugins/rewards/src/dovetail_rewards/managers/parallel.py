"""The reward manager `parallel`: runs reward functions in worker processes, which are killed at a time-out."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import sys

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import Failure, FailureKind, Outcome, PluginContext, RunningTime, Sample
from dovetail.random_streams import stream_seed
from dovetail_rewards.manager_config import ParallelConfig
from dovetail_rewards.managers.function_manager import FunctionManager, require_functions
from dovetail_rewards.managers.wire import Garbled, arguments_of, unpack_outcome
from dovetail_rewards.process_pool import (
    ProcessDiedError,
    ProcessPool,
    RequestTimeoutError,
    StartError,
)
from dovetail_rollouts import RewardCall, RewardFunctions

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail_rewards.managers.worker import main; main(int(sys.argv[1]))"
)


class ParallelManager(FunctionManager):
    """Scores samples in worker processes, where a reward function can't block or crash the run.

    Each worker is a fresh interpreter that constructs the functions by name or from their file. Functions are called in the worker's main
    thread, so that rules that use signals (math-verify) work. `reward.timeout` counts from the start of a sample's scoring; at the limit
    the worker is killed. A crash fails only the sample that was being scored, as `crash`, retryable. Workers answer in JSON, so that nothing
    from them is unpickled; results of processes that a function forked are ignored. The first MiB of a worker's prints is shown. Workers end with the
    manager or with this process.
    """

    name = "parallel"
    aliases = ("prime",)
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions", "processes"})
    queues = True
    Config = ParallelConfig

    def __init__(self, config: ParallelConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._pool: ProcessPool | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.pids if self._pool is not None else []

    def start(self) -> None:
        """Start the workers, and wait until they have constructed their functions.

        Raises:
            ConfigError: there are no functions, or the functions can't be constructed in another process.
            RewardError: a worker could not start.
        """
        setup = _setup(require_functions(self.name, self.context))
        path = json.dumps([str(entry) for entry in sys.path])
        self._pool = ProcessPool(
            [sys.executable, "-c", _BOOT, str(os.getpid()), path],
            self.config.workers or cores(),
            setup={"setup": base64.b64encode(setup).decode()},
            start_timeout=self.config.start_timeout,
            log=lambda message: self.context.logger.warning(
                f"reward manager 'parallel': {message}"
            ),
        )
        try:
            self._pool.start()
        except StartError as error:
            self.close()
            raise RewardError(
                f"reward manager 'parallel': {error.message}",
                hint="check that the reward functions can be imported, by name or from their file, in a new process; "
                "if they load slowly, raise reward.manager.start_timeout",
            ) from error

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        assert self._pool is not None, "the reward manager is not started"
        try:
            pickled = pickle.dumps(arguments_of(sample, call.fields))
        except Exception as error:  # noqa: BLE001 - whatever a row holds
            message = f"the row can't be sent to a worker process: {type(error).__name__}: {error}"
            return Failure(kind=FailureKind.EXCEPTION, message=message)
        request = {
            "sample": base64.b64encode(pickled).decode(),
            "seed": stream_seed(self.context.seed, "torch", "reward", sample.sample_id),
        }
        answered = self._pool.submit(request, time.limit)
        kind = FailureKind.CRASH
        try:
            with time.waiting():  # the pool enforces the limit, from the start of the work
                return unpack_outcome((await asyncio.wrap_future(answered)).get("outcome"))
        except RequestTimeoutError:
            kind = FailureKind.TIMEOUT
            message = f"reward function {call.name} returned no score within {time.limit:g} s; its worker process was killed"
        except ProcessDiedError as error:
            message = f"reward function {call.name} failed: its worker process {error.message} while it scored the sample"
        except StartError as error:
            message = f"reward function {call.name} was not called: {error.message}"
        except (InterruptedError, Garbled) as error:
            message = f"reward function {call.name} gave no score: {error}"
        return Failure(kind=kind, message=message, retryable=True)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _setup(functions: RewardFunctions) -> bytes:
    """Return the pickled functions, from which a worker constructs them.

    Raises:
        ConfigError: a function can't be pickled.
    """
    try:
        return pickle.dumps((functions.files(), pickle.dumps(functions)))
    except Exception as error:
        raise ConfigError(
            "reward manager 'parallel' can't send a reward function to its worker processes: "
            f"{type(error).__name__}: {error}",
            hint="define the function at the top level of a file and set reward.function={path: my_reward.py, "
            "attribute: compute_score}; or set reward.manager.name=naive",
        ) from error
