"""Driver: TensorRT-LLM's asynchronous engine, driven under the event loop that it lives on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import SamplingParams
from dovetail.serving import Outcome, SampleCall, SampleResult, merged_outcomes
from dovetail_rollout_trtllm.calls import (
    result_of,
    sampling_arguments,
    scores_of,
    scoring_arguments,
)
from dovetail_rollout_trtllm.engine_imports import imported, memory_tags
from dovetail_rollout_trtllm.engine_types import Engine, Params, Request, set_up

_DEATHS = ("EngineDeadError", "ActorDiedError", "RayActorError", "ActorUnavailableError")
"""Errors of TensorRT-LLM and Ray that say that a worker's process is gone."""


class EngineDeadError(RolloutError):
    """A worker's process is gone, and the engine with it. The protocol knows it by this name."""


class Driver:
    """One engine that somebody else started and will end.

    Args:
        engine: TensorRT-LLM's AsyncLLM, set up.
        sleeps: whether it was started so that its memory can be freed.

    Attributes:
        dead: what its workers died of; None while they live.
    """

    def __init__(self, engine: Engine, *, sleeps: bool) -> None:
        self._engine = engine
        self._sleeps = sleeps
        self._running: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._params: dict[SamplingParams, Params] = {}
        self._one_by_one = asyncio.Lock()
        self.dead: str | None = None

    @property
    def running(self) -> int:
        """Samples that are generated."""
        return len(self._running)

    async def generate(self, call: SampleCall) -> SampleResult:
        """One sample; cancelling the task aborts it.

        Raises:
            RolloutError: TensorRT-LLM refuses or fails it.
        """
        if call.call_id in self._running:
            raise RolloutError(f"two running calls have the id {call.call_id!r}")
        sampling = call.sampling
        # Stop strings that come about by other tokens than their own are looked for as tokens stream in, and not otherwise.
        request = self._submit(
            call.prompt_ids, self._params_of(sampling), streaming=bool(sampling.stop)
        )
        self._running[call.call_id] = request
        try:
            await self._ended(request)
        finally:
            del self._running[call.call_id]
        return result_of(request, log_probs=sampling.log_probs or sampling.raw_log_probs)

    async def abort(self, names: Sequence[str]) -> None:
        """End these calls: `generate` returns their tokens so far."""
        for name in names:
            if name in self._running:
                self._running[name].abort()

    async def score(self, sequences: Sequence[list[int]]) -> list[np.ndarray]:
        """float32 [L_i − 1]: log-probabilities (full softmax, temperature 1) of every token but the first."""
        self._refuse_dead()
        params = imported("SamplingParams")(**scoring_arguments())

        async def one(ids: list[int]) -> np.ndarray:
            # What comes from the prefix cache has no logits: a salt of its own finds nothing there.
            request = self._submit(ids, params, salt=f"dovetail-score-{next(self._numbers)}")
            await self._ended(request)
            return scores_of(request, ids)

        return list(await asyncio.gather(*map(one, sequences)))

    async def reset_cache(self) -> None:
        """Forget cached prefixes."""
        _refuse_failed(await self._everywhere("dovetail_reset_cache"), "forget cached prefixes")

    async def connect(self, info: Mapping[str, Any]) -> Outcome:
        """Every worker makes its receiver of weights.

        Args:
            info: of `weight_wire.transport_info`.
        """
        return merged_outcomes(
            await self._everywhere("dovetail_connect", json.dumps(info)), version=0
        )

    async def load(self, manifest: Mapping[str, Any]) -> Outcome:
        """Every worker receives, verifies and loads an update, and forgets cached prefixes.

        Args:
            manifest: of `weight_wire.manifest_info`.
        """
        found = await self._everywhere("dovetail_receive", json.dumps(manifest))
        return merged_outcomes(found, version=int(manifest["version"]))

    async def sleep(self, tags: frozenset[str]) -> int:
        """Free the memory of these tags, and return the bytes measured; 0 where the engine was not started for it."""
        if not self._sleeps or not tags:
            return 0
        # A prefix that is still known would be looked for in memory that is gone.
        await self.reset_cache()
        before = await self._free_bytes()
        await self._engine.release(tags=memory_tags(tags))
        return max(await self._free_bytes() - before, 0)

    async def wake(self, tags: frozenset[str]) -> None:
        """Take it again."""
        if self._sleeps and tags:
            await self._engine.resume(tags=memory_tags(tags))

    # -- the pieces ----------------------------------------------------------------------------

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: Params,
        *,
        streaming: bool = False,
        salt: str | None = None,
    ) -> Request:
        self._refuse_dead()
        try:
            return self._engine.generate_async(
                list(prompt_ids), params, streaming=streaming, cache_salt=salt
            )
        except ValueError as error:
            raise RolloutError(f"TensorRT-LLM refuses a request: {error}") from error

    async def _ended(self, request: Request) -> None:
        try:
            await request
        except asyncio.CancelledError:
            request.abort()
            raise
        except ValueError as error:
            raise RolloutError(f"TensorRT-LLM refuses a request: {error}") from error
        except Exception as error:
            self._note_death(error)
            raise

    async def _everywhere(self, method: str, *arguments: str) -> Sequence[str]:
        """Call a method of `DovetailWorker` in every worker; one call at a time."""
        self._refuse_dead()
        async with self._one_by_one:
            try:
                return await self._engine.collective_rpc(method, args=arguments)
            except Exception as error:
                self._note_death(error)
                raise

    async def _free_bytes(self) -> int:
        return sum(int(found) for found in await self._everywhere("dovetail_free_bytes"))

    def _params_of(self, sampling: SamplingParams) -> Params:
        """One object for all samples that are drawn alike."""
        if sampling not in self._params:
            if len(self._params) > 64:
                self._params.clear()
            processed = imported("LogprobMode").PROCESSED
            made: Params = imported("SamplingParams")(**sampling_arguments(sampling, processed))
            if sampling.stop:
                set_up(made, self._engine)
            self._params[sampling] = made
        return self._params[sampling]

    def _note_death(self, error: Exception) -> None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names.intersection(_DEATHS):
            self.dead = f"{type(error).__name__}: {error}"
            raise EngineDeadError(self.dead) from error

    def _refuse_dead(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)


def _refuse_failed(outcomes: Sequence[str], what: str) -> None:
    outcome = merged_outcomes(outcomes, version=0)
    if outcome.error is not None:
        raise RolloutError(f"TensorRT-LLM could not {what}: {outcome.error}")
