"""Scorer: passes samples to the reward manager while other samples still generate, and returns one outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Sequence

import numpy as np

from dovetail.errors import RewardError
from dovetail.interfaces import (
    CountedTime,
    Failure,
    FailureKind,
    Outcome,
    RewardManager,
    Sample,
    Score,
    contained,
    error_text,
)
from dovetail_rollouts.rollout_seconds import BusyTime
from dovetail_rollouts.scoring.reward_calls import finite_float

LONGEST_BACKOFF = 30.0
"""The longest wait before a retry, in seconds."""
ANY_NUMBER = 1 << 30
"""The concurrency of a manager that queues samples itself, in practice unlimited."""


class BrokenAnswer(Failure):
    """The failure of a sample for which the reward manager returned neither a Score nor a Failure."""


class Scorer:
    """Scores samples with a reward manager: each sample gets exactly one outcome, a score or a failure.

    After `finish`, which lets the manager sleep, the scorer may be used again, also in another event loop.

    Args:
        manager: the started reward manager.
        timeout: seconds that one attempt at a sample may run, or at a group if the manager scores groups. Time in the
            queue, and time that the manager marks as waiting (`RunningTime.waiting`), do not count.
        retries: maximum number of further attempts while failures are retryable; the outcome is that of the last attempt.
        concurrency: number of samples or groups scored at once, as far as the manager's capacity allows; a manager that
            queues samples itself (`RewardManager.queues`) gets all at once.
        backoff: seconds before the first retry, doubled for each further retry.
    """

    def __init__(
        self,
        manager: RewardManager,
        *,
        timeout: float,
        retries: int = 0,
        concurrency: int = 64,
        backoff: float = 0.25,
    ) -> None:
        self._manager = manager
        self._timeout = timeout
        self._retries = retries
        places = min(concurrency, manager.capacity or concurrency)
        self._places = ANY_NUMBER if manager.queues else places
        self._backoff = backoff
        self.busy = BusyTime(lambda: asyncio.get_running_loop().time())
        self._begin()

    busy: BusyTime
    """The clock of scoring, with one open context for each sample or group that is being scored."""

    def add(self, sample: Sample, *, group: Hashable, group_size: int) -> None:
        """Start scoring a sample; if the manager scores groups, scoring starts when the sample's group is complete.

        Args:
            sample: the sample, whose `sample_id` is unique in the rollout.
            group: the key of the group; all samples with this key answer one prompt.
            group_size: the number of samples of the complete group.

        Raises:
            RewardError: the sample was added before.
            RuntimeError: no event loop is running.
        """
        if sample.sample_id in self._added:
            raise RewardError(f"sample {sample.sample_id!r} was added to the scorer twice")
        self._added[sample.sample_id] = None
        if self._manager.unit == "sample":
            self._start([sample])
            return
        waiting = self._waiting.setdefault(group, [])
        waiting.append(sample)
        if len(waiting) >= group_size:
            self._start(self._waiting.pop(group))

    async def outcomes(self, sample_ids: Collection[str]) -> dict[str, Outcome]:
        """Wait for the outcomes (scores or failures) of these samples, which were added before, and forget the samples.

        A group that stayed incomplete, because generation failed for some of its samples, is scored without them.

        Returns:
            Outcomes by `sample_id`, in the order given.
        """
        wanted = set(sample_ids)
        for group, samples in list(self._waiting.items()):
            if wanted.intersection(sample.sample_id for sample in samples):
                self._start(self._waiting.pop(group))
        await asyncio.gather(*(self._tasks[name] for name in sample_ids))
        found = {name: self._tasks[name].result()[name] for name in sample_ids}
        for name in sample_ids:
            del self._tasks[name], self._added[name]
        return found

    async def idle(self) -> None:
        """Wait until nothing is being scored; incomplete groups stay queued."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def finish(self) -> dict[str, Outcome]:
        """Wait for all samples since the last `finish`, let the manager sleep, and return scores and failures in the order of `add`."""
        found = await self.outcomes(list(self._added))
        self._begin()
        self._manager.sleep()
        return found

    async def forget(self, sample_ids: Collection[str]) -> None:
        """Stop scoring these samples; they may be added again.

        Args:
            sample_ids: the ids of the samples; of whole groups if the manager scores groups.
        """
        wanted = set(sample_ids)
        for group, samples in list(self._waiting.items()):
            if wanted.intersection(sample.sample_id for sample in samples):
                del self._waiting[group]
        tasks = {self._tasks.pop(name) for name in wanted if name in self._tasks}
        for name in wanted:
            self._added.pop(name, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all scoring after the rollout was abandoned, and let the manager sleep."""
        await self.forget(list(self._added))
        self._begin()
        self._manager.sleep()

    def _begin(self) -> None:
        self._waiting: dict[Hashable, list[Sample]] = {}
        self._added: dict[str, None] = {}
        self._tasks: dict[str, asyncio.Task[dict[str, Outcome]]] = {}
        self._free = asyncio.Semaphore(self._places)

    def _start(self, samples: Sequence[Sample]) -> None:
        task = asyncio.get_running_loop().create_task(self._score(samples))
        self._tasks |= {sample.sample_id: task for sample in samples}

    async def _score(self, samples: Sequence[Sample]) -> dict[str, Outcome]:
        with self.busy:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(min(self._backoff * 2 ** (attempt - 1), LONGEST_BACKOFF))
                async with self._free:
                    outcomes = await self._try(samples)
                if not any(
                    isinstance(outcome, Failure) and outcome.retryable for outcome in outcomes
                ):
                    break
        return {
            sample.sample_id: outcome for sample, outcome in zip(samples, outcomes, strict=True)
        }

    async def _try(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score samples once, and return one valid outcome for each; errors and time-outs of the manager become failures."""
        name = type(self._manager).name
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                answer = await contained(
                    self._manager.score(samples, CountedTime(self._timeout, limit))
                )
            outcomes = _checked(answer, samples, name)
        except Exception as error:  # noqa: BLE001 - a manager may raise anything
            if limit.expired():
                return self._timed_out(samples, name)
            message = f"reward manager {name!r} raised {error_text(error)}"
            return _all_failed(samples, FailureKind.CRASH, message)
        # A manager may swallow its cancellation and return outcomes, but these are too late.
        return self._timed_out(samples, name) if limit.expired() else outcomes

    def _timed_out(self, samples: Sequence[Sample], name: str) -> list[Outcome]:
        message = f"reward manager {name!r} returned no outcome within {self._timeout:g} s"
        return _all_failed(samples, FailureKind.TIMEOUT, message)


def _all_failed(samples: Sequence[Sample], kind: FailureKind, message: str) -> list[Outcome]:
    failure = Failure(kind=kind, message=message, retryable=True)
    return [failure for _ in samples]


def _checked(answer: object, samples: Sequence[Sample], name: str) -> list[Outcome]:
    """Return the manager's outcomes, with every invalid outcome replaced by a failure."""
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        what = f"returned {type(answer).__name__}; expected a list of outcomes"
    elif len(answer) != len(samples):
        what = f"returned {len(answer)} outcomes for {len(samples)} samples"
    else:
        return [
            _valid(outcome, sample, name) for outcome, sample in zip(answer, samples, strict=True)
        ]
    failure = BrokenAnswer(kind=FailureKind.CRASH, message=f"reward manager {name!r} {what}")
    return [failure for _ in samples]


def _valid(outcome: object, sample: Sample, name: str) -> Outcome:
    if isinstance(outcome, Failure):
        return outcome
    if not isinstance(outcome, Score):
        gave = f"{outcome!r:.80} ({type(outcome).__name__}); expected a Score or a Failure"
        message = f"reward manager {name!r} gave {gave}"
        return BrokenAnswer(kind=FailureKind.INVALID_VALUE, message=message)
    rewards, problem = None, _problem(outcome, sample)
    if problem is None and (rewards := outcome.on_tokens(sample)) is not None:
        problem = _problem_of_tokens(rewards, sample, float(outcome.value))
    if problem is not None:
        message = f"reward manager {name!r} gave {problem}"
        return Failure(kind=FailureKind.INVALID_VALUE, message=message)
    return Score(
        value=float(outcome.value),
        token_rewards=None if rewards is None else np.asarray(rewards, dtype=np.float32),
        components=outcome.components,
        extras=outcome.extras,
    )


def _problem(outcome: Score, sample: Sample) -> str | None:
    """Return what makes a score unusable, apart from its token rewards; None if nothing does."""
    if finite_float(outcome.value) is None:
        return f"the value {outcome.value!r:.80}, which is not a finite number"
    for part, figure in outcome.components.items():
        if finite_float(figure) is None:
            return f"the component {part} = {figure!r:.80}, which is not a finite number"
    by_turn, turns = outcome.turn_rewards, len(sample.trajectory.turns if sample.trajectory else ())
    if by_turn is not None and len(by_turn) != turns:
        return f"{len(by_turn)} turn rewards for {turns} turns"
    return None


def _problem_of_tokens(rewards: object, sample: Sample, value: float) -> str | None:
    rewards_T, known = np.asarray(rewards), sample.completion is not None
    if rewards_T.ndim != 1 or rewards_T.dtype.kind not in "fiub":
        return f"token rewards of shape {rewards_T.shape} and dtype {rewards_T.dtype}; expected numbers, [T]"
    if known and len(rewards_T) != len(sample.response_ids):
        return f"{len(rewards_T)} token rewards for {len(sample.response_ids)} response tokens"
    if not all(finite_float(reward) is not None for reward in rewards_T):
        return "token rewards that are not all finite"
    if not np.isclose(rewards_T.sum(dtype=np.float64), value, rtol=1e-4, atol=1e-4):
        return f"token rewards that sum to {rewards_T.sum():g}, but the value {value:g}"
    if known and (shown := np.count_nonzero(rewards_T[~sample.produced_T])):
        return f"token rewards other than 0 for {shown} tokens that the policy did not produce"
    return None
