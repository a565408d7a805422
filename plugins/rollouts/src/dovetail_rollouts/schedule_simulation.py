"""A run's schedule on a simulated clock: how long a step takes, and how long trainer and rollout wait for each other."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice

import attrs

from dovetail_rollouts.early_release import EarlyRelease


@attrs.frozen(kw_only=True)
class RunSchedule:
    """The settings that decide when trainer and rollout work.

    Attributes:
        groups: the number of prompts of a step.
        samples: the number of responses to a prompt.
        steps_behind: the largest age of the weights in steps; `Trainer.max_staleness`.
        over_sampling: the maximum number of outstanding prompts, as a multiple of a step's prompts; `Trainer.over_sampling`.
        sync_every: steps between two weight updates of the rollout.
        cut_short: whether running responses are interrupted by a weight update and continue afterwards; False if they finish first.
        take_turns: whether generation stops while a step trains, since both use the same accelerators.
        replicas: the number of rollout replicas.
        most_running: the limit of samples that a replica generates concurrently; None for no limit.
        ranks: the number of the actor's ranks.
    """

    groups: int
    samples: int
    steps_behind: int
    over_sampling: float | None
    sync_every: int
    cut_short: bool
    take_turns: bool
    replicas: int
    most_running: int | None
    ranks: int

    @property
    def most_outstanding(self) -> int:
        """The maximum number of outstanding prompts.

        A prompt is outstanding from the request of its samples until the weight update after the step that trains on them.
        """
        return round((self.over_sampling or self.steps_behind + 1) * self.groups)


@attrs.frozen(kw_only=True)
class Decoding:
    """The times of a replica's decoding step, which makes one token of each of r running samples in `fixed` + `each` · r seconds."""

    fixed: float
    each: float


@attrs.frozen(kw_only=True)
class Costs:
    """The times of the parts of a step, in seconds, and the mean length of prompts.

    Attributes:
        scoring: the time from a step's last response until its last score.
        collection: the trainer's time to take samples that are finished and scored.
        learning: the time of the training stages per token of prompts and responses, on one rank of the actor.
        publication: the time of one weight update of the rollout.
        prompt_tokens: the mean number of prompt tokens of a sample.
    """

    scoring: float
    collection: float
    learning: float
    publication: float
    prompt_tokens: float


@attrs.frozen(kw_only=True)
class Prediction:
    """Means over the steps of a simulation.

    Attributes:
        step_seconds: seconds per step.
        trainer_waits: share of the time in which the trainer waits for samples, or for running responses before a weight update.
        rollout_idle: share of the time in which no replica generates.
        generation_seconds: seconds per step in which at least one replica generates.
        sample_seconds: seconds of generation per step, summed over concurrent samples.
    """

    step_seconds: float
    trainer_waits: float
    rollout_idle: float
    generation_seconds: float
    sample_seconds: float


@attrs.define(eq=False)
class _Group:
    """A prompt's samples.

    Attributes:
        tokens: the total length of their responses in tokens.
        left: the number of samples that have not ended.
        due: the last step that may train on them.
        ended: the time when the last sample ended, in seconds; infinite before.
    """

    tokens: int
    left: int
    due: int
    ended: float = math.inf

    @property
    def finished(self) -> bool:
        return not self.left


class _Replica:
    """A replica that decodes all running samples in lockstep, while further samples wait in order. Each replica has its own clock.

    Attributes:
        now: the time of the replica's clock, in seconds.
        empty_since: the time when the last sample ended, if no sample runs.
        sample_seconds: the seconds for which samples ran or waited, summed over samples.
    """

    def __init__(self, decoding: Decoding, most_running: int | None) -> None:
        self.now = self.empty_since = self.sample_seconds = 0.0
        self._decoding, self._most_running = decoding, most_running or math.inf
        self._position = 0.0
        self._running: list[tuple[float, int, _Group]] = []
        self._waiting: deque[tuple[int, _Group]] = deque()
        self._count = 0

    @property
    def next(self) -> float:
        """The time when the next sample ends; infinite if no sample runs."""
        return self._next() if self._running else math.inf

    @property
    def outstanding(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def worked_until(self) -> float:
        return self.now if self._running else self.empty_since

    def add(self, group: _Group, lengths: Sequence[int]) -> None:
        self._waiting += [(length, group) for length in lengths]
        self._start()

    def move_to(self, end: float) -> None:
        while self._running and self._next() <= end:
            self.finish_one()
        if self._running:
            self._position += (end - self.now) / self._token_seconds()
        self._let_pass(end)

    def finish(self, group: _Group) -> None:
        """Advance the clock until all samples of a group have ended."""
        while group.left:
            self.finish_one()

    def _token_seconds(self) -> float:
        return self._decoding.fixed + self._decoding.each * len(self._running)

    def _next(self) -> float:
        return self.now + (self._running[0][0] - self._position) * self._token_seconds()

    def finish_one(self) -> None:
        self._let_pass(self._next())
        self._position, _, group = heapq.heappop(self._running)
        group.left -= 1
        if not group.left:
            group.ended = self.now
        self._start()
        if not self._running:
            self.empty_since = self.now

    def _let_pass(self, end: float) -> None:
        self.sample_seconds += (end - self.now) * self.outstanding
        self.now = end

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most_running:
            length, group = self._waiting.popleft()
            self._count += 1  # so that the heap never compares groups
            heapq.heappush(self._running, (self._position + length, self._count, group))


class _Rollout:
    """All replicas; new groups go to the replica with the fewest samples. `worked`: seconds in which any replica generated or scored."""

    def __init__(self, schedule: RunSchedule, decoding: Decoding, scoring: float) -> None:
        self.now = self.worked = 0.0
        self._scoring = scoring
        self._replicas = [
            _Replica(decoding, schedule.most_running) for _ in range(schedule.replicas)
        ]
        self._where: dict[_Group, _Replica] = {}

    @property
    def sample_seconds(self) -> float:
        return sum(replica.sample_seconds for replica in self._replicas)

    def add(self, lengths: Sequence[int], due: int) -> _Group:
        group = _Group(sum(lengths), len(lengths), due)
        replica = min(self._replicas, key=lambda replica: replica.outstanding)
        replica.add(group, lengths)
        self._where[group] = replica
        return group

    def wait_early(self, release: EarlyRelease, admitted: Sequence[_Group]) -> list[_Group]:
        """Advance the clock until `release` can choose the groups of a step, and return them once they are scored."""
        while (chosen := release.choose(admitted, release.batch)) is None:
            min(self._replicas, key=lambda replica: replica.next).finish_one()
        self.wait_for(chosen)
        return chosen

    def wait_for(self, groups: Sequence[_Group]) -> None:
        """Advance the clock until these groups are scored."""
        for group in groups:
            self._where.pop(group).finish(group)
        self.move_to(max(self.now, *(group.ended + self._scoring for group in groups)))

    def drain(self) -> None:
        """Advance the clock until no sample runs."""
        for group, replica in self._where.items():
            replica.finish(group)
        self.move_to(max(self.now, *(replica.worked_until for replica in self._replicas)))

    def move_to(self, end: float) -> None:
        for replica in self._replicas:
            replica.move_to(end)
        # Work is added only at the start of a span of time, so a replica without work is idle until the span's end.
        worked_until = max(replica.worked_until for replica in self._replicas) + self._scoring
        self.worked += max(min(worked_until, end) - self.now, 0.0)
        self.now = end

    def hold(self, seconds: float) -> None:
        """Advance the clock without generating."""
        self.now += seconds
        for replica in self._replicas:
            replica.now = self.now


def simulate(
    schedule: RunSchedule, decoding: Decoding, costs: Costs, lengths: Sequence[int], steps: int
) -> Prediction:
    """Return the mean times of a run with this schedule, after its start-up.

    Before each step, prompts are queued until (`steps_behind` + 1) · `groups` are outstanding: queued, or in a step that no weight
    update has followed. The step takes the prompts that were queued first. With `over_sampling` fewer prompts are outstanding, and
    the step takes the prompts that finish first, as far as `EarlyRelease` allows.

    Args:
        schedule: the schedule of the run.
        decoding: the decoding times of each replica.
        costs: the costs of the other parts of a step.
        lengths: response lengths in tokens, taken in order and repeated.
        steps: the minimum number of steps to average over.
    """
    source = cycle(lengths)
    rollout = _Rollout(schedule, decoding, costs.scoring)
    admitted: list[_Group] = []
    # Prompts that are queued together end together, so that steps repeat with the period of the queueing. The first two periods
    # are left out, since nothing was generated ahead of them.
    period = math.lcm(schedule.steps_behind + 1, schedule.sync_every)
    before = 2 * period
    steps += -steps % period
    waited = began = worked = sampled = 0.0
    for step in range(before + steps):
        if step == before:
            waited, began, worked = 0.0, rollout.now, rollout.worked
            sampled = rollout.sample_seconds
        unpublished = step % schedule.sync_every
        room = schedule.most_outstanding - len(admitted) - unpublished * schedule.groups
        room = max(room, schedule.groups - len(admitted))
        due = step - unpublished + schedule.steps_behind
        admitted += [rollout.add(list(islice(source, schedule.samples)), due) for _ in range(room)]
        start = rollout.now
        if schedule.over_sampling is None:
            taken = admitted[: schedule.groups]
            rollout.wait_for(taken)
        else:
            release = EarlyRelease(step=step, batch=schedule.groups)
            taken = rollout.wait_early(release, admitted)
        gone = set(taken)
        admitted = [group for group in admitted if group not in gone]
        rollout.move_to(rollout.now + costs.collection)
        waited += rollout.now - start
        tokens = sum(group.tokens + schedule.samples * costs.prompt_tokens for group in taken)
        learning = costs.learning * tokens / schedule.ranks
        if schedule.take_turns:
            rollout.hold(learning)
        else:
            rollout.move_to(rollout.now + learning)
        if (step + 1) % schedule.sync_every == 0:
            start = rollout.now
            if not schedule.cut_short:
                rollout.drain()
            waited += rollout.now - start
            rollout.hold(costs.publication)
    seconds = rollout.now - began
    worked = rollout.worked - worked
    return Prediction(
        step_seconds=seconds / steps,
        trainer_waits=waited / seconds,
        rollout_idle=max(1 - worked / seconds, 0.0),
        generation_seconds=worked / steps,
        sample_seconds=(rollout.sample_seconds - sampled) / steps,
    )


def generation_seconds(schedule: RunSchedule, decoding: Decoding, lengths: Sequence[int]) -> float:
    """Return the seconds that a rollout takes to generate the samples of one step, without other work."""
    rollout, source = _Rollout(schedule, decoding, 0.0), iter(lengths)
    for _ in range(schedule.groups):
        rollout.add(list(islice(source, schedule.samples)), 0)
    rollout.drain()
    return rollout.now
