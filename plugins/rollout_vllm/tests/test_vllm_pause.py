"""A pause while calls are being sent to vLLM, before vLLM has received them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import (
    FinishReason,
    PauseMode,
    RolloutRequest,
    SamplingParams,
    TensorSpec,
    WeightManifest,
)
from dovetail.metrics import Metric
from dovetail.random_streams import SampleStream
from dovetail_datasets import ModelFacts
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_serving import Backend, SampleCall, SampleResult


class SlowToHear(Backend):
    """Learns of a call only when an abort of it has already come once; its samples never end by themselves."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.aborts = 0
        self._known: dict[str, asyncio.Event] = {}
        self.frozen = False
        self.thawed_with: int | None = None

    def start(self) -> None:
        """Nothing to start."""

    async def generate(self, call: SampleCall) -> SampleResult:
        self.sent.set()
        while not self.aborts:
            await asyncio.sleep(0)
        ended = self._known[call.call_id] = asyncio.Event()
        await ended.wait()
        return SampleResult(
            response_ids=np.arange(2), finish_reason=FinishReason.ABORT, log_probs=None
        )

    async def abort(self, call_ids: Sequence[str]) -> None:
        for name in call_ids:
            if name in self._known:
                self._known.pop(name).set()
        self.aborts += 1

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        raise NotImplementedError

    async def reset_cache(self) -> None:
        """No cache."""

    def load(self, version: int, manifest: Any) -> None:
        if self.frozen:
            raise WeightSyncError(f"weight update {version} broke off")

    async def freeze(self) -> None:
        self.frozen, self.aborts = True, 1

    async def thaw(self) -> None:
        self.frozen, self.thawed_with = False, len(self._known)

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        return 0

    def wake(self, tags: frozenset[str]) -> None:
        """Nothing was let go."""

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def close(self) -> None:
        """Nothing to end."""


REQUEST = RolloutRequest(
    request_id="r",
    prompt_ids=np.arange(3),
    sampling=SamplingParams(max_new_tokens=8),
    streams=(SampleStream(seed=1, sample=0),),
)


def over_backend(config: Any, context: Any) -> tuple[VllmRollout, SlowToHear]:
    rollout = VllmRollout(config, attrs.evolve(context, transport=object()))
    rollout._facts = ModelFacts(vocab_size=300, max_positions=None, eos_token_ids=())
    rollout._backend = backend = SlowToHear()
    return rollout, backend


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_a_call_that_vllm_did_not_know_of_yet_is_interrupted_too(config, context, mode) -> None:
    async def act() -> int:
        rollout, backend = over_backend(config(), context())
        sample = asyncio.ensure_future(anext(aiter(rollout.submit(REQUEST))))
        await backend.sent.wait()
        async with asyncio.timeout(240):
            await rollout.pause(mode)
        sample.cancel()
        await asyncio.gather(sample, return_exceptions=True)
        return rollout._gate.running

    assert asyncio.run(act()) == 0


def test_calls_that_keep_their_cache_do_not_go_on_under_torn_weights(config, context) -> None:
    tensors = (TensorSpec(name="w", shape=(1,), dtype="float32"),)
    manifest = WeightManifest(version=1, kind="full", tensors=tensors)

    async def act() -> None:
        rollout, backend = over_backend(config(), context())
        sample = asyncio.ensure_future(anext(aiter(rollout.submit(REQUEST))))
        await backend.sent.wait()
        async with asyncio.timeout(240):
            await rollout.pause(PauseMode.KEEP_CACHE)
            while not backend._known:
                await asyncio.sleep(0)
            with pytest.raises(WeightSyncError, match="broke off"):
                await asyncio.to_thread(rollout.receive_weights, 1, manifest)
            assert not sample.done()
            await rollout.resume()
            with pytest.raises(RolloutError, match="update 1 failed"):
                await sample
        assert backend.thawed_with == 0

    asyncio.run(act())
