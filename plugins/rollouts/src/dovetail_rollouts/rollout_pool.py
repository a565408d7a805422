"""RolloutPool: one client over many rollout replicas; every requested sample arrives exactly once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

import attrs
import numpy as np

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail.interfaces import BaseRollout, Completion, PauseMode, RolloutRequest, closable
from dovetail_rollouts.replica_states import Replica, ReplicaFault, ReplicaState
from dovetail_rollouts.replicas import ReplicaSet, Restart

_REMEMBERED_CONVERSATIONS = 100_000

Rescue = Callable[[Sequence[ReplicaFault]], None]
"""A function that restarts the replicas with the current weights after all were lost, or raises an error."""


class RolloutPool:
    """Distributes requests over replicas by outstanding tokens, and retries failed requests on other replicas.

    Args:
        replicas: started replicas.
        max_failures: number of failures in a row after which a replica gets no requests until it is restarted or updated;
            requests in flight that fail together count once.
        restart: a function that closes a replica and starts a new one in its place; None if replicas can't be restarted.
        addresses: URLs of the servers that the first replicas joined, in the replicas' order.

    Attributes:
        replicas: the members of the pool and their states.
        rescue: a function that restarts the replicas when all are lost during generation, after which missing samples are
            requested again. Called in a thread, once for all pending requests. None if requests fail instead.
    """

    def __init__(
        self,
        replicas: Iterable[BaseRollout],
        *,
        max_failures: int = 3,
        restart: Restart | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self.replicas = ReplicaSet(replicas, restart=restart, addresses=addresses)
        self._max_failures = max_failures
        self.rescue: Rescue | None = None
        self._rescuing: asyncio.Task[None] | None = None
        self._attempts = 1
        self._conversations: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether no replica has a request in flight."""
        return not any(member.requests for member in self.replicas.members)

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no replica has a request in flight, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for member in self.replicas.members:
                    if member.requests:
                        await member.idle.wait()

    async def submit(
        self, request: RolloutRequest, conversation: Hashable | None = None
    ) -> AsyncGenerator[Completion, None]:
        """Yield every sample of one request as it finishes.

        If a replica fails, the missing samples are requested from another replica. A sample keeps its random stream on any replica.
        Requests with the same `conversation` go to the same replica while it is usable.

        Raises:
            RequestRefusedError: a replica refused the request, which is not retried.
            RolloutError: the request failed on every replica, or there is no replica.
            DovetailError: every replica was lost, and the rescue failed.
        """
        missing = dict(enumerate(request.streams))
        tried: set[Replica] = set()
        errors: list[str] = []
        cause: RolloutError | None = None
        while missing:
            member = self._choose(conversation, tried)
            if member is None:
                await self._rescued(_nobody_left(request, errors), cause)
                continue
            samples = list(missing)
            part = request
            if errors:  # a retry has its own id and requests only the missing samples
                part = attrs.evolve(
                    request,
                    request_id=_retry_name(request.request_id, len(errors)),
                    streams=tuple(request.streams[sample] for sample in samples),
                )
            self._attempts = max(self._attempts, len(errors) + 1)
            tried.add(member)
            known = member.incidents
            try:
                async with aclosing(self._ask(member, part, request.request_id)) as completions:
                    async for completion in completions:
                        sample = _original(samples, completion, missing)
                        del missing[sample]
                        if part is request:
                            yield completion
                        else:
                            name = request.request_id
                            yield attrs.evolve(completion, request_id=name, sample=sample)
                member.failures = 0
            except RequestRefusedError:
                raise  # the replica works, and a restarted one would refuse too
            except RolloutError as error:
                errors.append(f"replica {member.number}: {error.message}")
                cause = error
                counted = member.incidents != known
                member.request_failed(error, most=self._max_failures, counted=counted)

    async def abort(self, request_ids: Sequence[str], member: Replica | None = None) -> None:
        """End these requests early on every replica, or only on `member`."""
        names = [name for wanted in request_ids for name in _names_of(wanted, self._attempts)]
        members = self.replicas.members if member is None else (member,)
        await asyncio.gather(*(m.engine.abort(names) for m in members))

    async def score(
        self, sequences: Sequence[np.ndarray]
    ) -> dict[int, list[np.ndarray] | Exception]:
        """Return the log-probabilities of given tokens on every replica; see `BaseRollout.score`.

        Returns:
            By replica number, float32 [L_i − 1] for each sequence, or the replica's error.
        """
        members = self.replicas.members
        answers = await asyncio.gather(
            *(member.engine.score(sequences) for member in members), return_exceptions=True
        )
        found: dict[int, list[np.ndarray] | Exception] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            found[member.number] = answer
        return found

    async def freeze(self) -> list[Replica]:
        """Pause requests on every replica, with their KV cache, until `thaw`; return the replicas that were asked to pause.

        A replica that can't pause its requests loses them, or interrupts them when the weights arrive.
        """
        members = [m for m in self.replicas.members if m.fault is None]
        await asyncio.gather(
            *(member.engine.pause(PauseMode.KEEP_CACHE) for member in members),
            return_exceptions=True,
        )
        return members

    async def thaw(self, members: Sequence[Replica]) -> list[Replica]:
        """Continue the requests that `freeze` paused; return those replicas that have failed meanwhile, whose requests must not continue."""
        answers = await asyncio.gather(
            *(member.engine.resume() for member in members), return_exceptions=True
        )
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, Exception):
                member.fail(answer)
        return [m for m in members if m.state in (ReplicaState.FAILED, ReplicaState.GONE)]

    def end_conversation(self, conversation: Hashable) -> None:
        """Forget which replica holds a conversation."""
        self._conversations.pop(conversation, None)

    async def _ask(
        self, member: Replica, request: RolloutRequest, name: str
    ) -> AsyncGenerator[Completion, None]:
        """Submit a request to one replica, and track the replica's outstanding tokens and requests; `name` is the id before retries."""
        cost = request.sampling.max_new_tokens
        prompt = len(request.prompt_ids)
        owed = prompt + cost * request.n
        member.outstanding += owed
        member.requests.add(name)
        member.idle.clear()
        left = request.n
        try:
            async with aclosing(closable(member.engine.submit(request))) as completions:
                async for completion in completions:
                    # `submit` reports a replica that sends too many samples; the outstanding tokens must not become negative.
                    paid = min(cost, owed)
                    owed -= paid
                    left -= 1
                    member.outstanding -= paid
                    yield completion
        finally:
            member.outstanding -= owed
            member.requests.discard(name)
            if not member.requests:
                member.idle.set()
        if left > 0:
            raise RolloutError(
                f"the engine ended a request with {left} of its {request.n} samples missing"
            )

    def _choose(self, conversation: Hashable | None, tried: set[Replica]) -> Replica | None:
        """Return the conversation's replica if it is usable, else the one with the fewest outstanding tokens; None if all were tried."""
        candidates = [m for m in self.replicas.members if m.usable and m not in tried]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda m: (m.outstanding, m.number))
        if conversation is None:
            return chosen
        known = self._conversations.get(conversation)
        chosen = next((m for m in candidates if m.number == known), chosen)
        self._conversations[conversation] = chosen.number
        self._conversations.move_to_end(conversation)
        if len(self._conversations) > _REMEMBERED_CONVERSATIONS:
            self._conversations.popitem(last=False)
        return chosen

    async def _rescued(self, refusal: RolloutError, cause: RolloutError | None) -> None:
        """Wait until the lost replicas are restarted. The first request that finds no replica starts this; later requests only wait.

        Args:
            refusal: the error of the request, raised if no restart helps: a replica is alive, `rescue` is None, or the pool is empty.
            cause: the last replica's error, which becomes the cause of `refusal`; None if no replica was tried.

        Raises:
            RolloutError: `refusal`.
            DovetailError: the restart failed.
        """
        if self.rescue is None or not self.replicas.size:
            raise refusal from cause
        # A finished task is not awaited: awaiting it returns at once, and this request would loop without yielding.
        if self._rescuing is None or self._rescuing.done():
            self._rescuing = asyncio.create_task(self._bring_back(self.rescue))
            self._rescuing.add_done_callback(_rescue_over)
        task = self._rescuing
        try:
            # Cancelling one waiting request must not cancel the rescue, since other requests wait for it.
            await asyncio.shield(task)
        except _ReplicaAliveError:
            raise refusal from cause

    async def _bring_back(self, rescue: Rescue) -> None:
        lost = await asyncio.to_thread(self.replicas.lost)
        if len(lost) < self.replicas.staying:
            raise _ReplicaAliveError
        await asyncio.to_thread(rescue, lost)


def _names_of(request_id: str, attempts: int) -> list[str]:
    """Return every id under which a request may run within this number of attempts."""
    return [request_id, *(_retry_name(request_id, attempt) for attempt in range(1, attempts))]


def _original(samples: list[int], completion: Completion, missing: Mapping[int, object]) -> int:
    """Return the index of a completion's sample in the original request.

    Args:
        samples: the samples of the sent request, which may be a retry, as indices in the original request.
        completion: a completion of the sent request.
        missing: the samples of the original request that have not arrived, by index.

    Raises:
        RolloutError: the sample was not requested, or has arrived before.
    """
    if not 0 <= completion.sample < len(samples):
        raise RolloutError(
            f"the engine returned the sample number {completion.sample}; expected 0 to {len(samples) - 1}"
        )
    sample = samples[completion.sample]
    if sample not in missing:
        raise RolloutError(f"the engine returned the sample number {completion.sample} twice")
    return sample


def _nobody_left(request: RolloutRequest, errors: list[str]) -> RolloutError:
    """Return the error of a request that no replica can take."""
    if not errors:
        return RolloutError(
            f"request {request.request_id!r} can't be generated: no rollout replica is left",
            hint="add a replica with `dovetail pool add`, or raise rollout.replicas",
        )
    return RolloutError(
        f"request {request.request_id!r} failed on every rollout replica: " + "; ".join(errors)
    )


def _retry_name(request_id: str, attempt: int) -> str:
    return f"{request_id}#retry{attempt}"


def _rescue_over(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        # Every waiting request raises the error. If all were cancelled, asyncio would warn that it was never retrieved.
        task.exception()


class _ReplicaAliveError(Exception):
    """The reason why a rescue does nothing: at least one replica is alive."""
