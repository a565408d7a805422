"""EngineDriver: vLLM's asynchronous engine, driven under the event loop that it lives on, in whatever process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from dovetail.errors import RolloutError
from dovetail_rollout_vllm.adapters import adapter_name
from dovetail_rollout_vllm.backend import SampleCall, SampleResult
from dovetail_rollout_vllm.calls import SamplingTable, result_of, scores_of
from dovetail_rollout_vllm.versions import free_kv_cache
from dovetail_rollout_vllm.wire import Outcome
from dovetail_rollout_vllm.worker_methods import merged

_RESET_SECONDS = 30.0


class EngineDriver:
    """One AsyncLLM that somebody else started and will end.

    Args:
        engine: vLLM's AsyncLLM.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._table = SamplingTable()
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._scored = 0
        self._adapter: Any = None
        self._asleep: frozenset[str] = frozenset()
        self._along: frozenset[str] = frozenset()
        self._updating = asyncio.Lock()

    @property
    def running(self) -> Collection[str]:
        """The requests that run."""
        return self._running

    @property
    def dead(self) -> bool:
        """Whether vLLM has found its engine's process dead."""
        return bool(self._engine.errored)

    async def generate(self, call: SampleCall) -> SampleResult:
        """One sample; cancelling the task aborts it.

        Raises:
            RolloutError: vLLM refuses the request.
            Exception: whatever vLLM raises where it fails.
        """
        params = self._table.of(call.sampling, call.seed)
        return result_of(await self._request(call.call_id, call.prompt_ids, params))

    async def abort(self, names: Sequence[str]) -> None:
        """End these requests: `generate` returns their tokens so far."""
        here = [name for name in names if name in self._running]
        self._aborted.update(here)
        if here:
            await self._engine.abort(here)

    async def score(self, sequences: Sequence[list[int]]) -> list[np.ndarray]:
        """float32 [L_i − 1]: log-probabilities (full softmax, temperature 1) of every token but the first."""

        async def one(ids: list[int]) -> np.ndarray:
            self._scored += 1
            name = f"dovetail-score-{self._scored}"
            return scores_of(await self._request(name, ids, self._table.scoring()), len(ids))

        return list(await asyncio.gather(*map(one, sequences)))

    async def reset_cache(self) -> None:
        """Forget cached prefixes; requests that run compute theirs again.

        Raises:
            RolloutError: vLLM holds on to them.
        """
        if self._running:
            await self._engine.reset_prefix_cache(reset_running_requests=True)
            return
        deadline = time.monotonic() + _RESET_SECONDS
        # What was ended a moment ago keeps its blocks until the step that was under way is over.
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"vLLM has not let go of its cached prefixes for {_RESET_SECONDS:g} s, though nothing runs: they "
                    "may be of old weights"
                )
            await asyncio.sleep(0.01)

    async def connect(self, info: dict[str, Any]) -> Outcome:
        """Every worker makes its receiver of weights.

        Args:
            info: of `wire.transport_info`.
        """
        return await self._everywhere("dovetail_connect", info, version=0)

    async def load(self, manifest: dict[str, Any]) -> Outcome:
        """Every worker receives, verifies and loads an update; cached prefixes are forgotten.

        Args:
            manifest: of `wire.manifest_info`.
        """
        version = int(manifest["version"])
        outcome = await self._everywhere("dovetail_receive", manifest, version=version)
        if outcome.error is None:
            self._adapter = _adapter(version, outcome.adapter)
            await self.reset_cache()
        return outcome

    async def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        """Free the memory of these tags on the accelerators, and return the bytes measured."""
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            return 0
        before = await self._free_bytes()
        apart = self._asleep
        if "weights" in tags - apart:
            # vLLM frees weights only together with the KV cache, and neither where one of them sleeps.
            if apart:
                await self._engine.wake_up(sorted(apart, reverse=True))
            self._along = frozenset({"kv_cache"}) - tags - apart
            await self._engine.sleep(level=1 if keep_weights else 2)
            self._asleep = tags | apart | self._along
        elif tags <= apart:
            self._along -= tags
        elif await free_kv_cache(self._engine):
            self._along = frozenset()
            self._asleep |= tags
        return max(await self._free_bytes() - before, 0)

    async def wake(self, tags: frozenset[str]) -> None:
        """Take it again; what had to sleep along with the weights wakes with them."""
        due = self._asleep & (tags | self._along if "weights" in tags else tags)
        if due:
            await self._engine.wake_up(sorted(due, reverse=True))
            self._asleep -= due

    async def _request(self, name: str, prompt_ids: Sequence[int], params: Any) -> Any:
        """The last word that vLLM has on one request."""
        from vllm.inputs import tokens_input

        engine, queue = self._engine, None
        if name in self._running:
            raise RolloutError(f"two running calls have the id {name!r}")
        self._running.add(name)
        try:
            prompt = tokens_input(list(prompt_ids))
            queue = await engine.add_request(name, prompt, params, lora_request=self._adapter)
            if name in self._aborted:
                # It came while the request was on its way.
                await engine.abort(name)
            while True:
                output = queue.get_nowait() or await queue.get()
                if output.finished:
                    return output
        except asyncio.CancelledError:
            if queue is not None:
                await engine.abort(name)
            raise
        except ValueError as error:
            raise RolloutError(f"vLLM refuses request {name!r}: {error}") from error
        finally:
            self._running.discard(name)
            self._aborted.discard(name)
            if queue is not None:
                queue.close()

    async def _everywhere(self, method: str, info: dict[str, Any], *, version: int) -> Outcome:
        """Call a method of `WorkerMethods` in every worker; one call at a time."""
        async with self._updating:
            outcomes = await self._engine.collective_rpc(method, args=(json.dumps(info),))
        return merged(outcomes, version)

    async def _free_bytes(self) -> int:
        return sum(await self._engine.collective_rpc("dovetail_free_bytes"))


def _adapter(version: int, number: int | None) -> Any:
    if number is None:
        return None
    from vllm.lora.request import LoRARequest

    name = adapter_name(version)
    return LoRARequest(name, number, f"received/{name}")
