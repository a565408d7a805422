"""Simulates `streaming` whose trainer lends its accelerators to generation while it waits for samples, from what a run measured.

    python benchmarks/lent_gpus.py runs/PROJECT/RUN --lent 1 [--wake 0.3] [--prefill 5e-6]
    python benchmarks/lent_gpus.py --generation 11.7 --update 3.2 --lent 1

Nothing of Dovetail lends accelerators; this says what it would gain. The first form takes lengths and seconds from a run, as
`dovetail plan --from-run` does. The second assumes lengths (log-normal, median 300, σ 1, at most 4,096), the seconds in which one
replica generates a step of 64 × 8 samples, and those of an update; of a decode step's time `--shares` are fixed, the rest is per sample.

A lent replica wakes when the trainer begins to wait and sleeps when the step's samples are ready; each time samples move so that all
replicas that are awake have about as many, and a replica computes the tokens of what it is given anew. Prints a line of JSON for
each decode time: seconds a step `on_policy`, `streaming`, and with lent accelerators, and how far the simulation without them
is from that of `dovetail plan`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import numpy as np

from dovetail_rollouts.early_release import EarlyRelease
from dovetail_rollouts.measured_run import read_run, schedule_of
from dovetail_rollouts.schedule_simulation import (
    Costs,
    Decoding,
    RunSchedule,
    generation_seconds,
    simulate,
)

WARM_UP = 6
"""Steps of a simulation that are left out."""


@attrs.define(eq=False)
class Group:
    """A prompt's samples that have not ended, and the last step that may train on them."""

    tokens: int
    left: int
    due: int

    @property
    def finished(self) -> bool:
        return not self.left


@attrs.define(eq=False)
class Sample:
    """A response: tokens so far, and all of them."""

    group: Group
    made: float
    length: int


class Replica:
    """Decodes its samples together; `busy` are seconds in which it computes tokens anew first."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding, self.running, self.busy = decoding, list[Sample](), 0.0

    def token_seconds(self) -> float:
        return self.decoding.fixed + self.decoding.each * len(self.running)

    def next(self) -> float:
        """Return the seconds until a sample ends; infinite without one."""
        if not self.running:
            return math.inf
        return self.busy + self.token_seconds() * min(s.length - s.made for s in self.running)

    def pass_time(self, seconds: float) -> None:
        """Decode for so long, at most until a sample ends."""
        idle = min(self.busy, seconds)
        self.busy -= idle
        tokens = (seconds - idle) / self.token_seconds() if self.running else 0.0
        for sample in self.running:
            sample.made += tokens
        ended = [s for s in self.running if s.made >= s.length - 1e-6]
        for sample in ended:
            sample.group.left -= 1
        if ended:
            self.running = [s for s in self.running if s.made < s.length - 1e-6]


class Rollout:
    """Replicas, the lent ones last. `now` are seconds since the beginning."""

    def __init__(self, decoding: Decoding, own: int, lent: int, prefill: float) -> None:
        self.now, self.own, self.prefill = 0.0, own, prefill
        self.replicas = [Replica(decoding) for _ in range(own + lent)]
        self.awake = self.replicas[:own]

    def add(self, samples: Sequence[Sample]) -> None:
        min(self.awake, key=lambda replica: len(replica.running)).running += samples

    def lend(self, wake: float) -> None:
        """Wake all replicas, and give each as many samples."""
        self.awake = self.replicas
        for replica in self.replicas[self.own :]:
            replica.busy = wake
        self.even_out()

    def take_back(self) -> None:
        """Let the lent replicas sleep; their samples go to the others."""
        left = [sample for replica in self.replicas[self.own :] for sample in replica.running]
        for replica in self.replicas[self.own :]:
            replica.running, replica.busy = [], 0.0
        self.awake = self.replicas[: self.own]
        for sample in left:
            self.move(sample)

    def even_out(self) -> None:
        """Move samples from the replicas with the most to those with the fewest; those with the fewest tokens cost least."""
        most = -(-sum(len(r.running) for r in self.awake) // len(self.awake))
        for replica in self.awake:
            replica.running.sort(key=lambda sample: -sample.made)
            moved, replica.running = replica.running[most:], replica.running[:most]
            for sample in moved:
                self.move(sample)

    def move(self, sample: Sample) -> None:
        replica = min(self.awake, key=lambda replica: len(replica.running))
        replica.running.append(sample)
        replica.busy += self.prefill * sample.made

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            span = min(end - self.now, *(replica.next() for replica in self.awake))
            span = max(span, 1e-9)
            for replica in self.awake:
                replica.pass_time(span)
            self.now += span


def step_seconds(
    schedule: RunSchedule,
    decoding: Decoding,
    costs: Costs,
    lengths: Sequence[int],
    args: argparse.Namespace,
    lent: int,
) -> float:
    """Return the mean seconds of a step, once the run is under way."""
    source, admitted = cycle(lengths), list[Group]()
    rollout = Rollout(decoding, schedule.replicas, lent, args.prefill)
    began = 0.0
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            began = rollout.now
        for _ in range(schedule.most_outstanding - len(admitted)):
            own = list(islice(source, schedule.samples))
            group = Group(sum(own), len(own), step + schedule.steps_behind)
            rollout.add([Sample(group, 0.0, length) for length in own])
            admitted.append(group)
        if lent:
            rollout.lend(args.wake)
        release = EarlyRelease(step=step, batch=schedule.groups)
        while (taken := chosen(schedule, release, admitted)) is None:
            rollout.pass_time(min(replica.next() for replica in rollout.awake) + 1e-9)
        if lent:
            rollout.take_back()
        admitted = [group for group in admitted if group not in taken]
        rollout.pass_time(costs.scoring + costs.collection)
        tokens = sum(group.tokens + schedule.samples * costs.prompt_tokens for group in taken)
        rollout.pass_time(costs.learning * tokens / schedule.ranks)
        rollout.now += costs.publication
    return (rollout.now - began) / args.steps


def chosen(
    schedule: RunSchedule, release: EarlyRelease, admitted: Sequence[Group]
) -> list[Group] | None:
    """Return the groups of a step where they are finished: the first, or with over-sampling whichever end first."""
    if schedule.over_sampling is not None:
        return release.choose(admitted, release.batch)
    first = list(admitted[: schedule.groups])
    return first if all(group.finished for group in first) else None


def assumed(args: argparse.Namespace) -> tuple[RunSchedule, Costs, list[int], list[Decoding]]:
    """Return what the options say, with a decode time for each of `--shares`."""
    drawn = np.random.default_rng(1).lognormal(np.log(300), 1.0, 512 * 40)
    lengths = np.clip(drawn, 1, 4096).astype(int).tolist()
    plain = RunSchedule(
        groups=64,
        samples=8,
        steps_behind=3,
        over_sampling=2.0,
        sync_every=1,
        cut_short=True,
        take_turns=False,
        replicas=1,
        most_running=None,
        ranks=1,
    )
    tokens = 512 * (128 + fmean(lengths))
    costs = Costs(
        scoring=0.05,
        collection=0.05,
        learning=args.update / tokens,
        publication=0.13,
        prompt_tokens=128,
    )
    parts = [lengths[i : i + 512] for i in range(0, 8 * 512, 512)]
    fixed, each = (
        fmean(generation_seconds(plain, Decoding(fixed=f, each=1 - f), part) for part in parts)
        for f in (1, 0)
    )
    decodings = [
        Decoding(fixed=args.generation * s / fixed, each=args.generation * (1 - s) / each)
        for s in args.shares
    ]
    return plain, costs, lengths, decodings


def main() -> None:
    """Simulate, and print a line for each decode time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="of streaming, separate from its rollout")
    parser.add_argument(
        "--lent", type=int, default=1, help="replicas on the trainer's accelerators"
    )
    parser.add_argument("--wake", type=float, default=0.3, help="seconds, weights included")
    parser.add_argument("--prefill", type=float, default=5e-6, help="seconds a token computed anew")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--generation", type=float, default=11.7, help="seconds; without a run")
    parser.add_argument("--update", type=float, default=3.2, help="seconds; without a run")
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    args = parser.parse_args()
    if args.run:
        measured = read_run(args.run)
        schedule, costs, lengths = schedule_of(measured.plan), measured.costs(), measured.lengths
        decodings = measured.decodings()
    else:
        schedule, costs, lengths, decodings = assumed(args)
    on_policy = attrs.evolve(schedule, steps_behind=0, over_sampling=None)
    for decoding in decodings:
        found: dict[str, Any] = {"fixed_ms": decoding.fixed * 1e3, "each_us": decoding.each * 1e6}
        found["on_policy_s"] = simulate(
            on_policy, decoding, costs, lengths, args.steps
        ).step_seconds
        planned = simulate(schedule, decoding, costs, lengths, args.steps)
        found["streaming_s"] = planned.step_seconds
        found["trainer_waits"] = planned.trainer_waits
        alone, lent = (
            step_seconds(schedule, decoding, costs, lengths, args, n) for n in (0, args.lent)
        )
        found |= {"lent_s": lent, "gain": alone / lent, "off": alone / planned.step_seconds - 1}
        sys.stdout.write(json.dumps({k: round(v, 3) for k, v in found.items()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
