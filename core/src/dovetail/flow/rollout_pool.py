"""RolloutPool: one client over many rollout replicas; every requested sample arrives exactly once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import attrs

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces.rollout import BaseRollout, Completion, PauseMode, RolloutRequest

if TYPE_CHECKING:
    from dovetail.interfaces.transport import WeightManifest

T = TypeVar("T")

_REMEMBERED_CONVERSATIONS = 100_000


@attrs.define(eq=False)
class _Replica:
    """A replica and what the pool knows of it."""

    engine: BaseRollout
    number: int
    outstanding: int = 0
    """Tokens that were asked for and have not come."""
    requests: int = 0
    """Requests in flight."""
    failures: int = 0
    """Incidents since the last success, however many requests each of them took down."""
    incidents: int = 0
    """Incidents ever."""
    draining: bool = False
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)


class RolloutPool:
    """Spreads requests over replicas by outstanding tokens, and takes failed ones elsewhere.

    Args:
        replicas: started replicas.
        max_failures: a replica that fails so often in a row gets no more requests, until it joins again;
            requests that were in flight together and fail together are one failure.
    """

    def __init__(self, replicas: Iterable[BaseRollout], *, max_failures: int = 3) -> None:
        self._replicas: list[_Replica] = []
        self._max_failures = max_failures
        self._numbers = 0
        self._conversations: OrderedDict[Hashable, int] = OrderedDict()
        for engine in replicas:
            self.join(engine)

    @property
    def replicas(self) -> tuple[BaseRollout, ...]:
        """The replicas that take requests."""
        return tuple(replica.engine for replica in self._usable())

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound of the tokens that are still to come, over all replicas."""
        return sum(replica.outstanding for replica in self._replicas)

    # Generation

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        conversations: Sequence[Hashable | None] | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Yield every sample of every request as it finishes, in any order.

        Args:
            requests: their ids must differ.
            conversations: a key for each request, or None; requests with one key go to one replica
                while it lives, whose cache knows what was said before.

        Raises:
            RolloutError: a request failed on every replica, or there is none; the rest is aborted.
        """
        _refuse_doubles(requests)
        keys = conversations or [None] * len(requests)
        inbox: asyncio.Queue[Completion | BaseException | None] = asyncio.Queue()

        async def forward(request: RolloutRequest, key: Hashable | None) -> None:
            try:
                async with aclosing(self.submit(request, key)) as completions:
                    async for completion in completions:
                        inbox.put_nowait(completion)
                inbox.put_nowait(None)
            except Exception as error:  # noqa: BLE001 - raised again where the samples are awaited
                inbox.put_nowait(error)

        # All tasks take their first step in one turn of the event loop, so that an engine sees the
        # requests together.
        tasks = [
            asyncio.create_task(forward(request, key))
            for request, key in zip(requests, keys, strict=True)
        ]
        running = len(tasks)
        try:
            while running:
                item = await inbox.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(
        self, request: RolloutRequest, conversation: Hashable | None = None
    ) -> AsyncGenerator[Completion, None]:
        """Yield every sample of one request as it finishes.

        When a replica fails, only the samples that have not come are asked of another one. A sample
        keeps its random stream wherever it is made.

        Raises:
            RolloutError: the request failed on every replica, or there is none.
        """
        missing = dict(enumerate(request.streams))
        tried: set[int] = set()
        errors: list[str] = []
        cause: RolloutError | None = None
        while missing:
            replica = self._choose(conversation, tried)
            if replica is None:
                raise _nobody_left(request, errors) from cause
            tried.add(replica.number)
            samples = list(missing)
            part = _part(request, samples, attempt=len(tried) - 1)
            known = replica.incidents
            try:
                async with aclosing(self._ask(replica, part)) as completions:
                    async for completion in completions:
                        sample = _original(samples, completion, missing)
                        del missing[sample]
                        yield attrs.evolve(completion, request_id=request.request_id, sample=sample)
                replica.failures = 0
            except RolloutError as error:
                if replica.incidents == known:
                    replica.failures += 1
                    replica.incidents += 1
                # Else it went down with others in an incident that is counted.
                errors.append(f"replica {replica.number}: {error.message}")
                cause = error

    async def _ask(
        self, replica: _Replica, request: RolloutRequest
    ) -> AsyncGenerator[Completion, None]:
        """Submit to one replica, counting what is outstanding there."""
        cost = request.sampling.max_new_tokens
        prompt = len(request.prompt_ids)
        owed = prompt + cost * request.n
        replica.outstanding += owed
        replica.requests += 1
        replica.idle.clear()
        left = request.n
        try:
            async with aclosing(_as_generator(replica.engine.submit(request))) as completions:
                async for completion in completions:
                    # A replica that sends too much is found out by `submit`; it must not owe less than 0.
                    paid = min(cost, owed)
                    owed -= paid
                    left -= 1
                    replica.outstanding -= paid
                    yield completion
        finally:
            replica.outstanding -= owed
            replica.requests -= 1
            if not replica.requests:
                replica.idle.set()
        if left > 0:
            raise RolloutError(f"it ended without {left} of {request.n} samples")

    def _choose(self, conversation: Hashable | None, tried: set[int]) -> _Replica | None:
        """The conversation's replica while it lives, else the one with the least to do."""
        candidates = [r for r in self._usable() if r.number not in tried]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda r: (r.outstanding, r.number))
        if conversation is None:
            return chosen
        known = self._conversations.get(conversation)
        chosen = next((r for r in candidates if r.number == known), chosen)
        self._conversations[conversation] = chosen.number
        self._conversations.move_to_end(conversation)
        if len(self._conversations) > _REMEMBERED_CONVERSATIONS:
            self._conversations.popitem(last=False)
        return chosen

    def end_conversation(self, conversation: Hashable) -> None:
        """Forget which replica holds a conversation."""
        self._conversations.pop(conversation, None)

    def _usable(self) -> list[_Replica]:
        return [r for r in self._replicas if not r.draining and r.failures < self._max_failures]

    # Members

    def join(self, engine: BaseRollout) -> None:
        """Take in a replica; one that is in already counts as mended."""
        self._replicas = [r for r in self._replicas if r.engine is not engine]
        self._replicas.append(_Replica(engine, self._numbers))
        self._numbers += 1

    async def drain(self, engine: BaseRollout) -> None:
        """Send a replica nothing more, wait until it has finished, and let it go.

        Raises:
            RolloutError: it is not in the pool.
        """
        replica = next((r for r in self._replicas if r.engine is engine), None)
        if replica is None:
            raise RolloutError("a replica that is not in the pool can't be drained")
        replica.draining = True
        if replica.requests:
            await replica.idle.wait()
        self._replicas.remove(replica)

    # Control: every replica does the same

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early on every replica."""
        names = [name for wanted in request_ids for name in _names(wanted, self._numbers)]
        await asyncio.gather(*(r.engine.abort(names) for r in self._replicas))

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop starting work on every replica."""
        await asyncio.gather(*(r.engine.pause(mode) for r in self._replicas))

    async def resume(self) -> None:
        """Take up work again on every replica."""
        await asyncio.gather(*(r.engine.resume() for r in self._replicas))

    async def reset_cache(self) -> None:
        """Forget cached prefixes on every replica."""
        await asyncio.gather(*(r.engine.reset_cache() for r in self._replicas))

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """Load new weights on every replica, all at the same time.

        Raises:
            WeightSyncError: at least one replica refused; it keeps the old version.
        """
        results = self._each(lambda engine: engine.receive_weights(version, manifest))
        failed = [(r, error) for r, error in results if isinstance(error, Exception)]
        if not failed:
            return
        if len(results) == 1:
            raise failed[0][1]
        complaints = "; ".join(f"replica {r.number}: {error}" for r, error in failed)
        raise WeightSyncError(
            f"{len(failed)} of {len(results)} replicas did not take version {version}: {complaints}"
        ) from failed[0][1]

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        """Free memory on every replica; returns the bytes freed."""
        return sum(_returned(result) for _, result in self._each(lambda engine: engine.sleep(tags)))

    def wake(self, tags: frozenset[str]) -> None:
        """Take the memory of these tags again on every replica."""
        for _, result in self._each(lambda engine: engine.wake(tags)):
            _returned(result)

    def close(self) -> None:
        """Close every replica; safe to call twice."""
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            replica.engine.close()

    def _each(self, call: Callable[[BaseRollout], T]) -> list[tuple[_Replica, T | Exception]]:
        """Call every replica at the same time; one alone is called in this thread."""

        def guarded(replica: _Replica) -> tuple[_Replica, T | Exception]:
            try:
                return replica, call(replica.engine)
            except Exception as error:  # noqa: BLE001 - the caller raises it, once all have answered
                return replica, error

        if len(self._replicas) == 1:
            return [guarded(self._replicas[0])]
        with ThreadPoolExecutor(max_workers=max(len(self._replicas), 1)) as pool:
            return list(pool.map(guarded, self._replicas))


def _returned(result: T | Exception) -> T:
    if isinstance(result, Exception):
        raise result
    return result


def _part(request: RolloutRequest, samples: list[int], *, attempt: int) -> RolloutRequest:
    """The request for some of its samples; a retry has an id of its own."""
    if attempt == 0:
        return request
    return attrs.evolve(
        request,
        request_id=_retry_name(request.request_id, attempt),
        streams=tuple(request.streams[sample] for sample in samples),
    )


def _retry_name(request_id: str, attempt: int) -> str:
    return f"{request_id}#retry{attempt}"


def _names(request_id: str, attempts: int) -> list[str]:
    """Every id under which a request may run."""
    return [request_id, *(_retry_name(request_id, attempt) for attempt in range(1, attempts))]


def _original(samples: list[int], completion: Completion, missing: Mapping[int, object]) -> int:
    """Which sample of the original request a completion is.

    Raises:
        RolloutError: it is none that was asked for, or came before.
    """
    if not 0 <= completion.sample < len(samples):
        raise RolloutError(f"it returned sample {completion.sample} of {len(samples)}")
    sample = samples[completion.sample]
    if sample not in missing:
        raise RolloutError(f"it returned sample {completion.sample} twice")
    return sample


def _nobody_left(request: RolloutRequest, errors: list[str]) -> RolloutError:
    if not errors:
        return RolloutError(
            f"request {request.request_id!r} can't be generated: no rollout replica is left",
            hint="join a replica, or raise rollout.replicas",
        )
    return RolloutError(
        f"request {request.request_id!r} failed on every rollout replica: " + "; ".join(errors)
    )


def _refuse_doubles(requests: Sequence[RolloutRequest]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise RolloutError(
                f"two requests have the id {request.request_id!r}",
                hint="give every request an id of its own",
            )
        seen.add(request.request_id)


async def _as_generator(completions: AsyncIterator[Completion]) -> AsyncGenerator[Completion, None]:
    """Any asynchronous iterator as a generator that passes its closing on."""
    try:
        async for completion in completions:
            yield completion
    finally:
        closing = getattr(completions, "aclose", None)
        if closing is not None:
            await closing()
