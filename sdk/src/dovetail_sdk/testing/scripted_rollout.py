"""A rollout replica that follows a script of answers, delays and failures, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import (
    BaseRollout,
    Completion,
    FinishReason,
    PauseMode,
    PluginConfig,
    PluginContext,
    RolloutRequest,
    WeightManifest,
)
from dovetail.sections import RolloutSection


async def answers(
    pool: Any, requests: Sequence[RolloutRequest], conversations: Sequence[Hashable] | None = None
) -> list[Completion]:
    """Submit requests to a rollout pool concurrently, and return all samples in order of arrival.

    Args:
        pool: the rollout pool.
        requests: the requests.
        conversations: a key per request; the pool sends requests with equal keys to the same replica.
    """
    found: list[Completion] = []

    async def one(request: RolloutRequest, conversation: Hashable | None) -> None:
        async for completion in pool.submit(request, conversation):
            found.append(completion)  # noqa: PERF401 - as they arrive

    keys = conversations or [None] * len(requests)
    await asyncio.gather(*map(one, requests, keys))
    return found


def stream_answer(request: RolloutRequest, sample: int) -> list[int]:
    """Return response tokens that depend only on the sample's random stream, as a real engine's response should."""
    low, _ = request.streams[sample].key()
    length = 1 + low % request.sampling.max_new_tokens
    return [(low >> shift) % 97 for shift in range(length)]


@attrs.frozen(kw_only=True)
class Script:
    """The script of a replica: its behaviour for each request.

    Attributes:
        fails_after: the number of samples that a request yields before the replica fails, for each request in order of arrival. Requests
            with None, or beyond the last entry, do not fail.
        answer: a function of a request and a sample's index in it that returns the sample's response tokens.
        delay: seconds before each sample.
    """

    fails_after: Sequence[int | None] = ()
    answer: Callable[[RolloutRequest, int], Sequence[int]] = stream_answer
    delay: float = 0.0


class ScriptedRollout(BaseRollout):
    """A rollout replica that follows a script and records its requests.

    Attributes:
        requests: every received request, in order.
        versions: every received weight version.
        aborted: every request id that `abort` was called with.
        closed: whether the replica was closed.
        asleep: tags of the memory that `sleep` released and `wake` has not restored.
    """

    name = "scripted"
    api = ">=1.0,<2"
    Config = RolloutSection

    def __init__(self, config: PluginConfig = None, context: PluginContext | None = None) -> None:
        super().__init__(config or RolloutSection(), context or PluginContext())
        self.script = Script()
        self.requests: list[RolloutRequest] = []
        self.versions: list[int] = []
        self.aborted: list[str] = []
        self.closed = False
        self.asleep: frozenset[str] = frozenset()
        self._begins, self._goes_on = asyncio.Event(), asyncio.Event()
        self._begins.set()
        self._goes_on.set()
        self._running: set[str] = set()

    @classmethod
    def following(cls, script: Script) -> ScriptedRollout:
        """Return a replica that follows this script."""
        rollout = cls()
        rollout.script = script
        return rollout

    async def submit(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.aborted = [name for name in self.aborted if name != request.request_id]
        plan = self.script.fails_after
        good = plan[number] if number < len(plan) else None
        await self._begins.wait()
        self._running.add(request.request_id)
        try:
            for sample in range(request.n):
                if good is not None and sample >= good:
                    break
                await self._goes_on.wait()
                await asyncio.sleep(self.script.delay)
                if request.request_id in self.aborted:
                    yield _completion(request, sample, [], FinishReason.ABORT, self.version)
                    continue
                tokens = list(self.script.answer(request, sample))
                yield _completion(request, sample, tokens, FinishReason.STOP, self.version)
        finally:
            self._running.discard(request.request_id)
        if good is not None:
            raise RolloutError(
                f"the request {request.request_id!r} failed after {good} samples, as scripted"
            )

    @property
    def version(self) -> int:
        """The current weight version."""
        return self.versions[-1] if self.versions else 0

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        self._begins.clear()
        if mode in (PauseMode.KEEP, PauseMode.KEEP_CACHE):
            self._goes_on.clear()
            return
        self._goes_on.set()
        if mode is PauseMode.ABORT:
            self.aborted += self._running
        while self._running:
            await asyncio.sleep(0.001)

    async def resume(self) -> None:
        self._begins.set()
        self._goes_on.set()

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        self.versions.append(version)

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        self.asleep |= tags
        return 1024 * len(tags)

    def wake(self, tags: frozenset[str]) -> None:
        self.asleep -= tags

    def close(self) -> None:
        self.closed = True


def _completion(
    request: RolloutRequest, sample: int, tokens: list[int], reason: FinishReason, version: int
) -> Completion:
    none = np.zeros(len(tokens), dtype=np.float32)
    return Completion(
        request_id=request.request_id,
        sample=sample,
        response_ids=np.array(tokens, dtype=np.int64),
        finish_reason=reason,
        weight_versions=np.full(len(tokens), version, dtype=np.int64),
        log_probs=none if request.sampling.log_probs else None,
        raw_log_probs=none if request.sampling.raw_log_probs else None,
    )
