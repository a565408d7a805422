"""Streaming generation and scoring: each sample is scored as soon as it is generated, while other samples still generate."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from time import monotonic

import attrs
import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import (
    Completion,
    FinishReason,
    RolloutRequest,
    RunningTime,
    Sample,
    Tokenizer,
)
from dovetail_rollouts.episodes import Episodes
from dovetail_rollouts.group import (
    BASELINE,
    Group,
    kept_of,
    missing_parts,
    requests_of,
    rest_of,
    sample_name,
)
from dovetail_rollouts.replica_states import Replica
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_seconds import BusyTime
from dovetail_rollouts.scoring.scorer import Scorer

Drawing = asyncio.Task[list[Sample]] | None
"""The task that generates a request's samples; None if there is nothing to generate."""
_AGAIN_SECONDS = 0.5


class Generation:
    """Generates the samples of groups, on the event loop of the rollout service.

    Args:
        pool: the replicas that generate responses.
        scorer: the scorer, which gets each sample when its response is complete.
        tokenizer: the tokenizer that decodes the text to score.
        seed: the seed of the run.
        episodes: the object that runs multi-turn episodes; None if a sample is one response to the prompt.

    Attributes:
        asking: the clock of the time in which the pool had at least one unanswered request.
        working: the clock of the time in which at least one response, episode or score was pending and not held back.
        held: whether new requests are held back.
        progress: the time of the last response, score or failure to score, in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        *,
        pool: RolloutPool,
        scorer: Scorer,
        tokenizer: Tokenizer,
        seed: int,
        episodes: Episodes | None = None,
    ) -> None:
        self._pool, self._scorer, self._tokenizer, self._seed = pool, scorer, tokenizer, seed
        self._episodes = episodes
        self.asking, self.working = BusyTime(), BusyTime()
        self._asked: set[str] = set()
        self._aborted: set[str] = set()
        self.progress = monotonic()
        self.held = False
        self._waiting: list[tuple[bool, int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()
        self._frozen: list[Replica] = []

    def begin(self, groups: Sequence[Group]) -> list[asyncio.Task[None]]:
        """Start generating the missing samples of all groups, and then their greedy responses.

        Returns:
            One task for each group, which waits for the group's samples and stores them in the group. The task raises RolloutError
            if the engine failed and no replica could take over.
        """

        def start(group: Group, request: RolloutRequest | None) -> Drawing:
            return None if request is None else asyncio.create_task(self._draw(group, request))

        for group in groups:
            group.place = next(self._count) if group.place is None else group.place
        asked = [requests_of(group, self._seed) for group in groups]
        samples = [start(group, request) for group, (request, _) in zip(groups, asked, strict=True)]
        greedy = [start(group, request) for group, (_, request) in zip(groups, asked, strict=True)]
        return [_whole(*parts) for parts in zip(groups, samples, greedy, strict=True)]

    def hold(self) -> None:
        """Hold back new requests until `go_on`; running requests continue."""
        self.held = True

    def go_on(self) -> None:
        """Send requests again, also for interrupted responses; requests of the oldest groups are sent first."""
        self.held = False
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # done if its task was cancelled
                turn.set_result(None)

    async def drain(self) -> None:
        """Hold back new requests, and wait until running requests have finished."""
        self.hold()
        while not self._pool.idle:
            await self._pool.wait_idle(_AGAIN_SECONDS)

    async def cut_short(self) -> None:
        """Hold back new requests, and abort running ones: each response keeps its tokens so far and is continued after `go_on`."""
        self.hold()
        while not self._pool.idle:
            # Repeated, since a request whose replica fails meanwhile is sent to another replica.
            # The requests are recorded before the abort, since interrupted responses may arrive before `abort` returns.
            self._aborted |= self._asked
            with suppress(RolloutError):  # an unreachable replica has lost its requests
                await self._pool.abort(sorted(self._asked))
            await self._pool.wait_idle(_AGAIN_SECONDS)

    async def freeze(self) -> None:
        """Hold back new requests, and pause running ones until `thaw`: each response stays in its engine with its KV cache."""
        self.hold()
        self._frozen = await self._pool.freeze()

    async def thaw(self) -> None:
        """Continue after `freeze`; requests on a replica that did not receive the weights continue on another replica."""
        for member in await self._pool.thaw(self._frozen):
            await self.move_from(member)
        self.go_on()

    async def move_from(self, member: Replica) -> None:
        """Abort the requests on a replica; each response continues on another replica, from its tokens so far."""
        while member.requests:
            self._aborted |= member.requests
            with suppress(RolloutError):  # an unreachable replica has lost its requests
                await self._pool.abort(sorted(member.requests), member)
            with suppress(TimeoutError):
                await asyncio.wait_for(member.idle.wait(), _AGAIN_SECONDS)

    async def _draw(self, group: Group, request: RolloutRequest) -> list[Sample]:
        """Generate the samples of a request, and score each sample as soon as it has arrived."""
        names = [sample_name(request, number) for number in range(request.n)]
        try:
            for sample in filter(None, map(group.arrived.get, names)):
                self._score(sample, request)
            if self._episodes is not None:
                await self._run_episodes(self._episodes, group, request, names)
            else:
                while parts := missing_parts(request, names, group):
                    await self._turn(group, request)
                    with self.working:
                        # `together` also for a single part: awaited directly, it would be sent before an earlier request of several parts.
                        await together(self._ask(group, request, *part) for part in parts)
            failed = {n: s.outcome for n, s in group.arrived.items() if s.outcome is not None}
            with self.working:
                outcomes = await self._scorer.outcomes([n for n in names if n not in failed])
            self.progress = monotonic()
        except BaseException:  # also if the task is cancelled
            # A retry uses the same sample names, so the samples of this attempt must not be scored any more.
            await self._scorer.forget(names)
            raise
        outcomes |= failed
        return [attrs.evolve(group.arrived.pop(name), outcome=outcomes[name]) for name in names]

    async def _run_episodes(
        self, episodes: Episodes, group: Group, request: RolloutRequest, names: Sequence[str]
    ) -> None:
        """Run the episodes of the missing samples, and score each sample when its episode ends."""

        async def run(number: int) -> None:
            name, stream = names[number], request.streams[number]
            alone = attrs.evolve(request, streams=(stream,))
            try:
                with self.working:
                    sample = await episodes.run(
                        alone,
                        group.prompt,
                        sample_id=name,
                        number=number,
                        ask=partial(self._respond, group, name),
                    )
            finally:
                self._pool.end_conversation(name)
            group.arrived[name] = sample
            group.cut = {
                turn: part for turn, part in group.cut.items() if not turn.startswith(f"{name}.")
            }
            self._score(sample, request)

        await together(run(n) for n, name in enumerate(names) if name not in group.arrived)

    async def _respond(
        self, group: Group, episode: str, request: RolloutRequest, time: RunningTime
    ) -> Completion:
        """Return the single response to a request of an episode; an interrupted response is continued.

        An episode that starts again, such as in a resumed run, gets its earlier responses again as long as its loop sends the
        same prompts.

        Args:
            group: the group of the episode, which stores the responses so far in `cut`.
            episode: the sample id of the episode; its requests go to the same replica.
            request: the request for one turn.
            time: the clock of the episode's time limit, which stops while requests are held back.
        """
        name, prompt = request.request_id, request.prompt_ids
        earlier = group.cut.get(name)
        before = None if earlier is None else earlier.prompt_ids
        if earlier is None or before is None or not np.array_equal(before, prompt):
            earlier = None
        elif earlier.finish_reason is not FinishReason.ABORT:
            return attrs.evolve(earlier, prompt_ids=None)
        while True:
            part = request if earlier is None else rest_of(request, name, 0, earlier)
            with time.waiting(), self.working.left():
                await self._turn(group, request)
            self._asked.add(part.request_id)
            try:
                with self.asking:
                    async with aclosing(self._pool.submit(part, episode)) as completions:
                        (found,) = [completion async for completion in completions]
                self.progress = monotonic()
            finally:
                cut_short = part.request_id in self._aborted
                self._asked.discard(part.request_id)
                self._aborted.discard(part.request_id)
            own = attrs.evolve(found, request_id=name)
            whole = own if earlier is None else own.after(earlier)
            left = request.sampling.max_new_tokens - len(whole.response_ids)
            goes_on = whole.finish_reason is FinishReason.ABORT and left > 0 and cut_short
            earlier = kept_of(whole, request.sampling) if goes_on else whole
            group.cut.pop(name, None)
            if earlier is not None and (goes_on or whole.finish_reason is not FinishReason.ABORT):
                group.cut[name] = attrs.evolve(earlier, prompt_ids=prompt)
            if not goes_on:
                return whole

    async def _turn(self, group: Group, request: RolloutRequest) -> None:
        """Wait while requests are held back; then the oldest groups' requests are sent first, and greedy requests last."""
        while self.held:
            turn = asyncio.get_running_loop().create_future()
            greedy = request.request_id.startswith(f"{BASELINE}.")
            heapq.heappush(self._waiting, (greedy, group.place or 0, next(self._count), turn))
            await turn

    async def _ask(
        self,
        group: Group,
        request: RolloutRequest,
        part: RolloutRequest,
        numbers: Sequence[int],
    ) -> None:
        """Send a part of a group's request, and store each response in the group on arrival, complete or interrupted.

        Args:
            group: the group.
            request: the request for all missing samples of the group.
            part: the request to send, for some of these samples; see `missing_parts`.
            numbers: for each sample of `part`, its index among the samples of `request`.
        """
        await self._turn(group, request)  # `hold` may have been called since `_draw` waited
        self._asked.add(part.request_id)
        missing = part.n
        self.asking.add(part.n)
        try:
            async with aclosing(self._pool.submit(part)) as completions:
                async for found in completions:
                    self.progress = monotonic()
                    self.asking.add(-1)
                    missing -= 1
                    number = numbers[found.sample]
                    name = sample_name(request, number)
                    whole = found
                    if part is not request:
                        own = attrs.evolve(found, request_id=request.request_id, sample=number)
                        earlier = group.cut.pop(name, None)
                        whole = own if earlier is None else own.after(earlier)
                    left = request.sampling.max_new_tokens - len(whole.response_ids)
                    ended = whole.finish_reason is not FinishReason.ABORT or not left
                    if ended or part.request_id not in self._aborted:
                        ids_T = whole.response_ids.tolist()
                        text = str(self._tokenizer.decode(ids_T, skip_special_tokens=True))
                        group.arrived[name] = sample = Sample(
                            sample_id=name, prompt=group.prompt, text=text, completion=whole
                        )
                        self._score(sample, request)
                    elif (kept := kept_of(whole, request.sampling)) is not None:
                        group.cut[name] = kept
        finally:
            self.asking.add(-missing)
            self._asked.discard(part.request_id)
            self._aborted.discard(part.request_id)

    def _score(self, sample: Sample, request: RolloutRequest) -> None:
        """Queue a sample for scoring, unless its episode failed."""
        if sample.outcome is None:
            self._scorer.add(sample, group=request.request_id, group_size=request.n)


def _whole(group: Group, samples: Drawing, greedy: Drawing) -> asyncio.Task[None]:
    def end(_: asyncio.Task[None]) -> None:
        for part in filter(None, (samples, greedy)):
            part.cancel()

    task = asyncio.create_task(_complete(group, samples, greedy))
    # A callback, since a task that is cancelled before it starts runs no `finally`.
    task.add_done_callback(end)
    return task


async def _complete(group: Group, samples: Drawing, greedy: Drawing) -> None:
    await together(part for part in (samples, greedy) if part is not None)
    group.samples += samples.result() if samples else []
    group.greedy = greedy.result()[0] if greedy else group.greedy
    group.finished = True


async def together(works: Iterable[Awaitable[object]]) -> None:
    """Await all awaitables; if one fails or the wait is cancelled, cancel the others before raising."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        # If one task fails, `gather` lets the others run on, and their samples would be generated for nothing.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
