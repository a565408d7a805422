"""EngineBackend: vLLM's asynchronous engine, driven from this process on a dedicated event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import PluginContext, WeightManifest
from dovetail.metrics import Metric
from dovetail.workers import LoopThread, await_turn
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_args import engine_arguments, make_engine_args
from dovetail_rollout_vllm.engine_driver import EngineDriver
from dovetail_rollout_vllm.engine_metrics import EngineMetrics, stat_logger
from dovetail_rollout_vllm.environment import print_to, process_environment, turn_of
from dovetail_rollout_vllm.failures import FAILURES
from dovetail_rollout_vllm.fused import Parts
from dovetail_rollout_vllm.metrics_endpoint import MetricsEndpoint, prometheus_logger
from dovetail_rollout_vllm.unfinished import await_process, end, engine_processes
from dovetail_rollout_vllm.versions import require
from dovetail_serving import (
    Backend,
    SampleCall,
    SampleResult,
    log_path,
    manifest_info,
    transport_info,
)

T = TypeVar("T")

_END_SECONDS = 20.0
"""Seconds that vLLM's processes may take to end. vLLM's default is 5, after which it often kills a process whose workers have ended,
so that Python cleans up shared memory with a warning."""
_WATCH_SECONDS = 0.5
"""Seconds between checks, during a call to all workers, that they are alive: if they die, vLLM's calls wait for ever."""


class EngineBackend(Backend):
    """Backend of a replica on one AsyncLLM of vLLM. The model runs in separate processes; this process holds the request queues.

    Attributes:
        log: the file to which the engine's processes print.
    """

    def __init__(self, config: VllmRolloutConfig, context: PluginContext) -> None:
        self._config, self._context = config, context
        self._metrics = EngineMetrics()
        self._loop: LoopThread | None = None
        self._engine: Any = None
        self._driver: EngineDriver | None = None
        self._endpoint: MetricsEndpoint | None = None

    def start(self) -> None:
        context = self._context
        require(context.logger)
        arguments = {**engine_arguments(self._config, context), "disable_log_stats": True}
        self.log = log_path("vllm", context)
        limit, turn = self._config.start_timeout, turn_of(context)
        with process_environment(self._config, context, self.log) as restore:
            if self._config.metrics_port is not None:
                # Opened first: if the port is taken, no engine is started in vain.
                self._endpoint = MetricsEndpoint(self._config.metrics_port + context.rank)
            self._loop = LoopThread(f"vllm-{context.rank}")
            others = engine_processes()
            try:
                making = self._loop.start(self._make(arguments))
                processes = await_process(others, making, limit)
                # Without a size in bytes, vLLM sizes the KV cache by measuring free memory, which another engine's start would change.
                if processes and "kv_cache_memory_bytes" in arguments:
                    restore()
                # The engine's processes import packages while this process waits until the training models are loaded; the
                # limit counts from then on.
                if turn is not None:
                    await_turn(turn)
                making.result(limit)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again in words
                if not making.done():
                    end(processes or [one for one in engine_processes() if one not in others])
                self.close()
                late = isinstance(error, TimeoutError)
                cause = TimeoutError(f"not ready within {limit:g} seconds") if late else error
                told = FAILURES.start(cause, self.log, self._config)
                raise told from None if told is error else error
        if self._endpoint is not None:
            context.logger.info("vLLM's metrics are served at %s", self._endpoint.url)
        if context.transport is not None:
            self._connect(context)

    @property
    def engine(self) -> Any:
        """The AsyncLLM, to be called only in the thread of `loop`."""
        return self._engine

    @property
    def loop(self) -> LoopThread:
        """The event loop on which the engine runs."""
        return self._open()[0]

    async def generate(self, call: SampleCall) -> SampleResult:
        loop, driver = self._open()
        return await loop.run(self._watched(driver.generate(call), call.call_id))

    async def abort(self, call_ids: Sequence[str]) -> None:
        loop, driver = self._open()
        await loop.run(self._watched(driver.abort(call_ids)))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        loop, driver = self._open()
        ids = [list(sequence) for sequence in sequences]
        return await loop.run(self._told(driver.score(ids), "score"))

    async def reset_cache(self) -> None:
        loop, driver = self._open()
        await loop.run(self._watched(driver.reset_cache()))

    async def freeze(self) -> None:
        loop, driver = self._open()
        await loop.run(self._watched(driver.freeze()))

    async def thaw(self) -> None:
        loop, driver = self._open()
        await loop.run(self._watched(driver.thaw()))

    def load(self, version: int, manifest: WeightManifest) -> None:
        loop, driver = self._open()
        try:
            outcome = loop.wait(self._watched(driver.load(manifest_info(manifest))))
        except RolloutError as error:
            raise WeightSyncError(
                f"weight update {version} broke off: {error.message}", hint=error.hint
            ) from error
        failure = outcome.failure()
        if failure is not None:
            raise failure

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        loop, driver = self._open()
        return loop.wait(self._watched(driver.sleep(tags, keep_weights=keep_weights)))

    def wake(self, tags: frozenset[str]) -> None:
        loop, driver = self._open()
        loop.wait(self._watched(driver.wake(tags)))

    def parts(self) -> Parts:
        """Return the names of the model's fused layers, each with the names of the checkpoint tensors that are fused."""
        loop, driver = self._open()
        return loop.wait(self._watched(driver.parts()))

    def alive(self) -> bool:
        return not self._dead()

    def metrics(self) -> Mapping[str, Metric]:
        return self._metrics.take()

    def close(self) -> None:
        loop, engine, endpoint = self._loop, self._engine, self._endpoint
        self._loop = self._engine = self._driver = self._endpoint = None
        if endpoint is not None:
            endpoint.close()
        if loop is None:
            return
        if engine is not None:
            loop.wait(_shut_down(engine))
        loop.close()

    # -- the pieces -------------------------------------------------------------------------------

    async def _make(self, arguments: Mapping[str, Any]) -> None:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        print_to(self.log)
        loggers = [stat_logger(self._metrics)]
        if self._config.metrics_port is not None:
            loggers.append(prometheus_logger())
        engine = AsyncLLM.from_engine_args(
            make_engine_args(arguments),
            # Selects vLLM's default limits of sequences and tokens in a pass: those for offline batches, not for chats.
            usage_context=UsageContext.LLM_CLASS,
            stat_loggers=loggers,
        )
        print_to(self.log)  # again, because making the engine resets vLLM's logging
        if self._loop is None:  # closed during the start
            engine.shutdown(timeout=_END_SECONDS)
            return
        driver = EngineDriver(engine)
        await driver.record()
        self._engine, self._driver = engine, driver

    def _connect(self, context: PluginContext) -> None:
        loop, driver = self._open()
        info = transport_info(context.transport, context)
        outcome = loop.wait(self._watched(driver.connect(info)))
        if outcome.error is not None:
            self.close()
            raise WeightSyncError(
                f"vLLM can't create its end of the weight transport: {outcome.error}",
                hint=outcome.hint,
            )

    async def _told(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of a call to the engine; raise any failure as a RolloutError. `what` names the call in the error."""
        try:
            return await work
        except RolloutError:
            raise
        except Exception as error:
            raise self._in_words(error, what) from error

    async def _watched(self, work: Coroutine[Any, Any, T], what: str = "a call") -> T:
        """Return the result of a call to the engine's processes; raise an error if they die during the call."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_WATCH_SECONDS)
                if not task.done() and self._dead():
                    task.cancel()
                    raise FAILURES.death("its engine process ended", self.log)
        except asyncio.CancelledError:
            # On cancellation, the driver aborts the request in vLLM: wait for this.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        return await self._told(_result(task), what)

    def _dead(self) -> bool:
        return self._driver is None or self._driver.dead

    def _in_words(self, error: Exception, what: str) -> RolloutError:
        if self._dead():
            return FAILURES.death(error, self.log)
        return RolloutError(
            f"vLLM failed in the operation {what!r}: {type(error).__name__}: {error}"
        )

    def _open(self) -> tuple[LoopThread, EngineDriver]:
        if self._loop is None or self._driver is None:
            raise RolloutError("vLLM is not running", hint="call `start` first")
        return self._loop, self._driver


async def _result(task: asyncio.Task[T]) -> T:
    return await task


async def _shut_down(engine: Any) -> None:
    engine.shutdown(timeout=_END_SECONDS)
