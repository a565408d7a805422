"""TrtllmBackend: a `trtllm-serve` process for one replica, restarted for every weight update."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from dovetail.errors import DovetailError, RolloutError, WeightSyncError
from dovetail.interfaces import PluginContext, WeightManifest
from dovetail.metrics import Max, Mean, Metric, Sum
from dovetail.workers import LoopThread
from dovetail_rollout_trtllm.calls import TokenStream, request_of
from dovetail_rollout_trtllm.checkpoint import write_checkpoint
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.server import ENGINE, FAILURES, server_command
from dovetail_serving import (
    Backend,
    CounterDelta,
    Counters,
    OwnServer,
    SampleCall,
    SampleResult,
    ServerConnection,
    WeightEnd,
    free_bytes,
    log_path,
    model_of,
    outcome_of,
    port_for,
    visible_devices,
)


class TrtllmBackend(Backend):
    """Runs a `trtllm-serve` process on the loopback interface, and restarts it on a new checkpoint for every weight update.

    Requests run on an event loop in a separate thread, the only one that uses the connections to the server.

    Args:
        config: the rollout's config.
        context: the context of the rollout. If the rollout receives weights, the first update starts the server.
    """

    _loop: LoopThread
    _updates: Path
    _name: str

    def __init__(self, config: TrtllmRolloutConfig, context: PluginContext) -> None:
        self._config, self._context = config, context
        self._own: OwnServer | None = None
        self._connection: ServerConnection | None = None
        self._end: WeightEnd | None = None
        self._running: dict[str, tuple[TokenStream, asyncio.Task[None]]] = {}
        # Each sample is a connection: samples that the server would only queue wait for this semaphore instead.
        self._room = asyncio.Semaphore(config.max_num_seqs)
        self._served: str | None = None if context.weights_follow else model_of(context).path
        self._asleep: frozenset[str] = frozenset()
        self._counters = Counters("new_tokens", "samples")
        self._delta = CounterDelta("rollout/trtllm/", "samples", _metrics)

    def start(self) -> None:
        config, context = self._config, self._context
        context.logger.warning(
            "rollout 'trtllm' has not been tested with the real TensorRT-LLM yet"
        )
        place = config.checkpoint_directory or context.run_directory
        if place is not None:
            Path(place).mkdir(parents=True, exist_ok=True)
        self._updates = Path(tempfile.mkdtemp(prefix=f"trtllm-{context.rank}-", dir=place))
        self._loop = LoopThread(f"{ENGINE}-server-{context.rank}")
        try:
            self._command = server_command(config, context, self._updates / "options.yaml")
            if context.transport is not None:
                self._end = WeightEnd(context.transport)
            self._serve()
        except BaseException:
            self.close()
            raise

    # -- samples -----------------------------------------------------------------------------------

    async def generate(self, call: SampleCall) -> SampleResult:
        return await self._loop.run(self._generate(call))

    async def _generate(self, call: SampleCall) -> SampleResult:
        tokenizer = self._context.tokenizer
        stream = TokenStream(call, None if tokenizer is None else tokenizer.decode)
        body = request_of(call, self._name)

        async def ask() -> None:
            async with self._room:
                with self._counters.running():
                    await self._reach().lines("/v1/completions", body, stream.take)

        asking = asyncio.create_task(ask())
        self._running[call.call_id] = stream, asking
        try:
            await asking
        except asyncio.CancelledError:
            # The server ends a sample whose connection is closed.
            if not stream.aborted:
                raise
        finally:
            del self._running[call.call_id]
        result = stream.result()
        self._counters.add(new_tokens=len(result.response_ids), samples=1)
        return result

    async def abort(self, call_ids: Sequence[str]) -> None:
        await self._loop.run(self._abort(call_ids))

    async def _abort(self, call_ids: Sequence[str]) -> None:
        for name in call_ids:
            if name in self._running:
                stream, asking = self._running[name]
                stream.aborted = True
                asking.cancel()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        raise RolloutError(
            "rollout 'trtllm' can't score given tokens: trtllm-serve does not support it"
        )

    async def reset_cache(self) -> None:
        """Do nothing, since a restarted server has no cached prefixes."""

    # -- weights and memory ------------------------------------------------------------------------

    def load(self, version: int, manifest: WeightManifest) -> None:
        """Write the new weights to disk while the server still runs, then restart the server with them."""
        assert self._end is not None  # without a transport, no update gets here
        end, written = self._end, self._updates / f"version-{version}-{manifest.update_id}"

        def write() -> None:
            with end.taking(manifest):
                tensors = end.receiver.receive(manifest)
                write_checkpoint(written, model_of(self._context), tensors)

        failure = outcome_of(write).failure()
        if failure is not None:
            shutil.rmtree(written, ignore_errors=True)
            raise failure
        self._served = str(written)
        self._stop()
        try:
            self._serve()
        except DovetailError as error:
            raise WeightSyncError(
                f"weight update {version} broke off: {error.message}", hint=error.hint
            ) from error
        finally:
            for old in set(self._updates.glob("version-*")) - {written}:
                shutil.rmtree(old, ignore_errors=True)

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        """Stop the server, which frees all its memory, and return the number of freed bytes; the weights are on disk."""
        self._asleep |= tags
        device = torch.device(self._context.device)
        before = free_bytes(device)
        self._stop()
        return max(free_bytes(device) - before, 0)

    def wake(self, tags: frozenset[str]) -> None:
        self._asleep -= tags
        self._serve()

    def alive(self) -> bool:
        return self._connection is None or self._connection.alive

    def metrics(self) -> Mapping[str, Metric]:
        return self._delta.since(self._counters.totals())

    def close(self) -> None:
        self._stop()
        self._loop.close()
        if self._end is not None:
            self._end.close()
            self._end = None
        shutil.rmtree(self._updates, ignore_errors=True)

    # -- the server --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Start a server and wait until it answers.

        Do nothing if a server runs, if any memory tag (weights, KV cache) is asleep, or if no weights have arrived yet.

        Raises:
            RolloutError: the server ended, did not answer in time, or another program answers; the error shows its output.
            DovetailError: the start failed for a known cause.
        """
        if self._own is not None or self._asleep or self._served is None:
            return
        config, context = self._config, self._context
        # The server names its model by the last part of the directory, or by the hub id.
        directory = Path(self._served)
        self._name = directory.name if directory.is_dir() else self._served
        port = port_for(config.port, context.rank, ENGINE)
        program, arguments = self._command
        ranks = config.tensor_parallel_size
        own = self._own = OwnServer(
            [program, self._served, *arguments, "--port", str(port)],
            port=port,
            log=log_path("trtllm", context),
            environment=visible_devices(ranks, context, "CUDA_VISIBLE_DEVICES"),
            failures=FAILURES,
            config=config,
        )
        context.logger.info("trtllm-serve %s starts; it prints to %s", own.url, own.log)

        async def ready() -> None:
            self._connection = ServerConnection(
                own.url, engine=ENGINE, ended=own.ended, died=own.death
            )
            await own.ready(self._connection, self._refuse_other_model)

        self._loop.wait(ready())

    async def _refuse_other_model(self) -> None:
        """Check that the server has this replica's model: another program may have taken the port."""
        response = await self._reach().get("/v1/models")
        if f'"{self._name}"' not in response.text:
            raise RolloutError(
                f"the server at {response.url} has the models {response.text[:200]}; expected {self._name!r}",
                hint="another program answers at this address: set rollout.port to a free port",
            )

    def _stop(self) -> None:
        """End the server, if there is one."""
        own, connection = self._own, self._connection
        self._own = self._connection = None
        if own is not None:
            if connection is not None:
                self._loop.wait(connection.close())
            own.close()

    def _reach(self) -> ServerConnection:
        if self._connection is None:
            raise RolloutError(f"the {ENGINE} server is not running", hint="wake the rollout first")
        return self._connection


def _metrics(grown: Mapping[str, float], totals: Mapping[str, float]) -> Mapping[str, Metric]:
    """Return metrics of the work since the last query; tokens of aborted samples count too.

    Args:
        grown: the increase of each counter since the last query.
        totals: the values of the counters, and `running_max`, the maximum number of concurrent requests since the last query.
    """
    return {
        "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
        "new_tokens": Sum(grown["new_tokens"]),
        "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
        "running_requests_max": Max(totals["running_max"]),
    }
