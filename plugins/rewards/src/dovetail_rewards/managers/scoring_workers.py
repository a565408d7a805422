"""ScoringWorkers: the controller's side of scoring in the runtime's processes. It distributes batches and replaces dead workers."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.errors import ConfigError, WorkerError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    Sample,
    TaskSpec,
    TaskWorker,
)
from dovetail.plugins import ref_for
from dovetail_rewards.manager_config import RemoteConfig
from dovetail_rewards.managers.inner import NAIVE
from dovetail_rewards.managers.scoring_task import TARGET, Ask, TaskSetup
from dovetail_rewards.managers.threads import DaemonThreads, HungCalls
from dovetail_rewards.managers.wire import Garbled, unpack_outcome

QUIET_SECONDS = 30.0
"""Seconds of silence after which a worker is pinged, if samples have no time limit."""


@attrs.define(eq=False)
class _Place:
    """A slot for a worker: its current worker process, its load and its failures."""

    worker: TaskWorker
    running: int = 0
    """Number of running batches."""
    alone: bool = False
    """Whether the worker is reserved for a sample that is scored alone."""
    deaths: int = 0
    """Number of consecutive deaths of the slot's workers, without an answer in between."""
    over: str | None = None
    """The reason why dead workers of this slot are no longer replaced; None while they are."""


class _LostError(Exception):
    """A worker died before it answered a batch."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ScoringWorkers:
    """Worker processes that score batches of samples. Each worker runs a reward manager, with the run's reward functions.

    A batch goes to the worker with the fewest batches. The worker enforces each sample's time limit. A worker that sends nothing for as
    long as that limit (without a limit, 30 seconds) is pinged, and killed if it does not answer within the same time. When a worker
    dies, each of its samples is scored again, alone on a worker; if that worker dies too, the sample fails with `crash` or `timeout`. A
    dead worker is restarted, at most `restarts` times in a row.

    Args:
        config: a config whose `workers` is set.
        context: the context of the manager; its `runtime` starts the processes.
    """

    def __init__(self, config: RemoteConfig, context: PluginContext) -> None:
        self._config, self._context = config, context
        self._places: list[_Place] = []
        self._threads = DaemonThreads(HungCalls())
        self._mending = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the workers, and wait until each has constructed its manager.

        Raises:
            ConfigError: the runtime can't start workers, or the functions can't be constructed in another process.
            DovetailError: a worker could not start.
        """
        config, runtime = self._config, self._context.runtime
        if runtime is None or "task_workers" not in runtime.capabilities:
            where = "outside a run" if runtime is None else f"under runtime {runtime.name!r}"
            raise ConfigError(
                f"reward.manager.workers={config.workers}: worker processes can't be started {where}",
                hint="set runtime.name=ray; or set reward.manager.name=parallel, which starts processes on this machine without Ray",
            )
        spec = TaskSpec(
            label="reward",
            target=TARGET,
            setup=_setup(config, self._context),
            count=config.workers or 1,
            cpus=config.cpus,
            accelerators=config.accelerators,
            start_timeout=config.start_timeout,
        )
        self._places = [_Place(worker) for worker in runtime.task_workers(spec)]

    async def score(self, samples: Sequence[Sample], limit: float | None) -> list[Outcome]:
        """Score a batch, and return the score or the Failure of each sample, in order.

        Args:
            samples: the samples of a batch.
            limit: seconds that each sample may run; None for no limit.
        """
        self._here()
        try:
            payloads = _payload(samples, limit)
        except Exception as error:  # noqa: BLE001 - whatever a row holds
            if len(samples) > 1:
                parts = [await self.score([sample], limit) for sample in samples]
                return [outcome for part in parts for outcome in part]
            message = f"the row can't be sent to a worker process: {type(error).__name__}: {error}"
            return [Failure(kind=FailureKind.EXCEPTION, message=message)]
        try:
            return await self._on_a_worker(payloads, len(samples), limit)
        except _LostError:
            return list(await asyncio.gather(*(self._alone(sample, limit) for sample in samples)))

    def sleep(self) -> None:
        """Ask the workers' reward managers to release memory until the next call (`RewardManager.sleep`), without waiting for an answer."""
        for place in self._places:
            if place.worker.lost is None:
                place.worker.call(pickle.dumps(Ask(what="sleep")))

    def close(self) -> None:
        """End every worker; safe to call twice."""
        self._closed = True
        for place in self._places:
            place.worker.close()
        self._places = []
        self._threads.close()

    def _here(self) -> None:
        """If the event loop has changed, make new locks and count all workers as idle: batches of the earlier loop never complete."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._changed = asyncio.Condition()
        self._suspects = asyncio.Lock()
        for place in self._places:
            place.running, place.alone = 0, False

    async def _on_a_worker(self, payload: bytes, count: int, limit: float | None) -> list[Outcome]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._open() or not self._living())
            if not self._living():
                return [self._nobody()] * count
            place = min(self._open(), key=lambda place: place.running)
            place.running += 1
        try:
            return await self._ask(place, payload, count, limit)
        finally:
            await self._leave(place)

    async def _alone(self, sample: Sample, limit: float | None) -> Outcome:
        """Score a sample whose worker died, on a worker without other samples; one such sample at a time."""
        payload = _payload([sample], limit)
        async with self._suspects:
            async with self._changed:
                if not self._living():
                    return self._nobody()
                place = min(self._living(), key=lambda place: place.running)
                place.alone = True
                try:
                    await self._changed.wait_for(lambda: place.running == 0)
                except BaseException:
                    place.alone = False
                    raise
                place.running = 1
            try:
                (outcome,) = await self._ask(place, payload, 1, limit)
            except _LostError as lost:
                message = f"sample {sample.sample_id}, scored alone, failed: {lost}"
                return Failure(kind=lost.kind, message=message, retryable=True)
            else:
                return outcome
            finally:
                place.alone = False
                await self._leave(place)

    async def _leave(self, place: _Place) -> None:
        # Decrement before waiting for the lock, since a cancellation may end that wait.
        place.running -= 1
        async with self._changed:
            self._changed.notify_all()

    async def _ask(
        self, place: _Place, payload: bytes, count: int, limit: float | None
    ) -> list[Outcome]:
        """Send a batch to a worker and return the outcomes.

        Raises:
            _LostError: the worker died or was killed; it is replaced if `restarts` allows.
        """
        worker, quiet = place.worker, limit or QUIET_SECONDS
        answer = _asked(worker, payload)
        while not (await asyncio.wait({answer}, timeout=quiet))[0]:
            ping = _asked(worker, pickle.dumps(Ask(what="ping")))
            both = {answer, ping}
            done, _ = await asyncio.wait(both, timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                worker.kill()
                await self._threads.run(lambda: self._replace(place, worker))
                text = f"{worker.where} did not answer within {quiet:g} s and was killed"
                raise _LostError(FailureKind.TIMEOUT, text)
        try:
            outcomes = _unpacked(answer.result(), count)
        except WorkerError as error:
            if worker.lost is None:
                return [_crash(error.message)] * count
            await self._threads.run(lambda: self._replace(place, worker))
            raise _LostError(FailureKind.CRASH, error.message) from None
        except Garbled as error:
            return [_crash(f"{worker.where} sent an invalid reply: {error}")] * count
        place.deaths = 0
        return outcomes

    def _replace(self, place: _Place, dead: TaskWorker) -> None:
        """Start another worker in place of a dead one, unless another call has already done so."""
        with self._mending:
            while place.worker is dead and place.over is None and not self._closed:
                place.deaths += 1
                if place.deaths > self._config.restarts:
                    place.over = f"{dead.lost} (loss {place.deaths} in a row; reward.manager.restarts={self._config.restarts})"
                    self._context.logger.error(f"{place.over}; the worker is not restarted")
                    return
                try:
                    place.worker = dead.again()
                except Exception as error:  # noqa: BLE001 - a runtime may raise anything; the samples go elsewhere
                    self._context.logger.warning(f"{dead.where} can't be restarted: {error!r}")

    def _living(self) -> list[_Place]:
        return [place for place in self._places if place.over is None]

    def _open(self) -> list[_Place]:
        return [place for place in self._living() if not place.alone]

    def _nobody(self) -> Failure:
        why = "; ".join(str(place.over) for place in self._places) or "none was started"
        return _crash(f"no reward worker is left: {why}")


def _asked(worker: TaskWorker, payload: bytes) -> asyncio.Future[bytes]:
    """Send a request to a worker and return a future for its answer; asyncio logs no error if the caller never reads its exception."""
    answer = asyncio.wrap_future(worker.call(payload))
    answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return answer


def _crash(message: str) -> Failure:
    return Failure(kind=FailureKind.CRASH, message=message)


def _payload(samples: Sequence[Sample], limit: float | None) -> bytes:
    return pickle.dumps(Ask(what="score", samples=tuple(map(_sent, samples)), limit=limit))


def _sent(sample: Sample) -> Sample:
    """Return a sample without the data that rewards don't use: the prompt's tokens and images, weight versions and log-probabilities."""
    nothing = np.zeros(0, np.int64)
    sequences = [
        attrs.evolve(
            one, weight_versions=nothing, log_probs=None, raw_log_probs=None, prompt_ids=None
        )
        for one in sample.sequences
    ]
    return attrs.evolve(
        sample,
        prompt=attrs.evolve(sample.prompt, prompt_ids=nothing, media=()),
        completion=sequences[-1] if sample.completion is not None else None,
        earlier=tuple(sequences[: len(sample.earlier)]),
    )


def _unpacked(answer: bytes, count: int) -> list[Outcome]:
    """Return the outcomes of an answer, in order.

    Raises:
        Garbled: the answer is malformed, or does not have one outcome per sample.
    """
    try:
        found = [unpack_outcome(text) for text in json.loads(answer)]
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled(f"{type(error).__name__}: {error}") from error
    if len(found) != count:
        raise Garbled(f"{len(found)} outcomes for {count} samples")
    return found


def _setup(config: RemoteConfig, context: PluginContext) -> bytes:
    """Return the pickled set-up from which a worker constructs its manager.

    Raises:
        ConfigError: a function can't be pickled.
    """
    ref = ref_for("reward_manager", config.manager or NAIVE)
    functions = context.reward_functions
    files: tuple[Any, ...] = () if functions is None else functions.files()
    if ref.path is not None:
        files += (attrs.evolve(ref, config=None),)
    try:
        return pickle.dumps(
            TaskSetup(
                files=files,
                manager=pickle.dumps(ref),
                functions=pickle.dumps(functions),
                seed=context.seed,
            )
        )
    except Exception as error:
        raise ConfigError(
            "reward manager 'remote' can't send a reward function to its worker processes: "
            f"{type(error).__name__}: {error}",
            hint="define the function at the top level of a file and set reward.function={path: my_reward.py, attribute: compute_score}",
        ) from error
