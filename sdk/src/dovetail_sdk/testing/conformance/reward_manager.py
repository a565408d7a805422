"""The suite of reward managers: one outcome for each sample, in order, and never a number for a failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    RewardManager,
    Sample,
    Score,
)
from dovetail.sections import PluginSection, RewardSection
from dovetail_rollouts import Scorer, configured_functions
from dovetail_sdk.testing import failing_reward, make_sample
from dovetail_sdk.testing.conformance.plugin import PluginConformance

KINDS = {
    "exception": FailureKind.EXCEPTION,
    "exit": FailureKind.EXCEPTION,
    "unreachable": FailureKind.UNREACHABLE,
    **dict.fromkeys(
        (
            "nan",
            "infinity",
            "text",
            "none",
            "list",
            "mapping_without_score",
            "mapping_with_nan",
        ),
        FailureKind.INVALID_VALUE,
    ),
}
"""Way in which a reward function fails immediately → the kind of failure that the outcome must have."""
KINDS_OF_PROCESSES = {
    "hang": FailureKind.TIMEOUT,
    "spin": FailureKind.TIMEOUT,
    "crash": FailureKind.CRASH,
    "kill": FailureKind.CRASH,
}
SETTLE = 60.0
"""Seconds within which the manager's threads and processes must end."""
PATIENCE = 120.0
"""Time limit in seconds of samples whose scoring ends, long enough for a busy machine."""


class RewardManagerConformance(PluginConformance):
    """Conformance suite for reward managers: subclass it and set `plugin` and `config`.

    The manager uses the reward function of `dovetail_sdk.testing.failing_reward`. A sample's `extra_info` makes this function fail on
    demand; otherwise the score is 1 if the response is the ground truth, else 0. For a manager that calls a scoring service, override
    `around` to run a service with this behaviour.

    The capability `timeout` adds tests of functions that hang; `processes` adds tests of functions that end their process.
    """

    kind = "reward_manager"
    plugin: ClassVar[type[RewardManager]]
    attribute: ClassVar[str] = "compute_score"
    """Name of the function of `failing_reward` to use: `compute_score`, or `compute_scores`, which takes lists."""
    shares_calls: ClassVar[bool] = False
    """Whether one call of the reward function scores several samples, so that a hanging sample makes others fail."""
    timeout: ClassVar[float] = 0.4
    """Time limit in seconds of samples whose scoring hangs, and of samples scored in the same call."""
    fails_on_demand: ClassVar[bool] = True
    """Whether a sample can make scoring fail; False for a manager that does not use the suite's reward function."""
    tolerance: ClassVar[float] = 0.0
    """Largest absolute difference of a score from `expected`."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run what the manager needs, such as a server, for the duration of the context."""
        yield

    @contextlib.contextmanager
    def started(self) -> Iterator[RewardManager]:
        """Yield a started manager, and close the manager after the block."""
        functions = configured_functions(
            RewardSection(
                function=PluginSection(path=failing_reward.__file__, attribute=self.attribute)
            ),
            PluginContext(),
        )
        with self.around():
            manager: RewardManager = self.make(reward_functions=functions)
            try:
                manager.start()
                yield manager
            finally:
                failing_reward.release_hung()
                manager.close()

    def expected(self, value: float) -> float:
        """Return the score that the manager should give a sample for which the reward function returns `value`."""
        return value

    def sample(self, name: str, *, right: bool = True, fail: str | None = None) -> Sample:
        """Return a sample with a right or a wrong response. If `fail` is given, scoring the sample fails in the way that it names."""
        return make_sample(
            name,
            "4" if right else "5",
            prompt="2 + 2 =",
            ground_truth="4",
            extra_info={"fail": fail} if fail else {"row": name},
            response_ids=np.arange(3),
        )

    def score(
        self,
        manager: RewardManager,
        samples: Sequence[Sample],
        *,
        endless: Collection[str] = (),
    ) -> dict[str, Outcome]:
        """Score samples with the manager, and return each sample's score or failure by sample id. Each sample is a group of its own.

        Samples whose ids are in `endless` get the short time limit `timeout`. If `shares_calls` is set and `endless` is not empty, all
        samples get this limit.
        """

        async def main() -> dict[str, Outcome]:
            patient, brief = (Scorer(manager, timeout=t) for t in (PATIENCE, self.timeout))
            for sample in samples:
                limited = sample.sample_id in endless or (endless and self.shares_calls)
                scorer = brief if limited else patient
                scorer.add(sample, group=sample.sample_id, group_size=1)
            brought = await brief.finish() if endless else {}
            brought |= await patient.finish()
            return {sample.sample_id: brought[sample.sample_id] for sample in samples}

        return asyncio.run(main())

    def test_scores_come_back_to_their_own_samples(self) -> None:
        samples = [self.sample(f"s{i}", right=i % 3 == 0) for i in range(60)]
        with self.started() as manager:
            outcomes = self.score(manager, samples)
        assert list(outcomes) == [sample.sample_id for sample in samples]
        assert self.expected(1.0) != self.expected(0.0)
        for i, outcome in enumerate(outcomes.values()):
            assert isinstance(outcome, Score), outcome
            assert outcome.value == self._near(float(i % 3 == 0))

    def test_every_way_to_fail_is_its_kind_and_never_a_number(self) -> None:
        self._needs_failures()
        # A call that can't be made fails all samples that share the call, so it is tested only if calls are not shared.
        apart = ["unreachable"] if self.shares_calls else []
        samples = [self.sample(how, fail=how) for how in KINDS if how not in apart]
        good = [self.sample(f"good{i}", right=i % 2 == 0) for i in range(12)]
        mixed = [*good[:4], *samples[:5], *good[4:8], *samples[5:], *good[8:]]
        with self.started() as manager:
            outcomes = self.score(manager, mixed)
            for how in apart:
                outcomes |= self.score(manager, [self.sample(how, fail=how)])
        for i, sample in enumerate(good):
            outcome = outcomes[sample.sample_id]
            assert isinstance(outcome, Score), outcome
            assert outcome.value == self._near(float(i % 2 == 0))
        kinds = {how: getattr(outcomes[how], "kind", outcomes[how]) for how in KINDS}
        assert kinds == KINDS
        for how in KINDS:
            failure = outcomes[how]
            assert isinstance(failure, Failure)
            assert failure.message

    def test_a_failure_says_which_line_raised(self) -> None:
        self._needs_failures()
        with self.started() as manager:
            outcome = self.score(manager, [self.sample("a", fail="exception")])["a"]
        assert isinstance(outcome, Failure)
        assert "a reward that fails on demand" in outcome.message
        if not manager.capabilities & {"service"}:
            assert f"({Path(failing_reward.__file__).name}, line " in outcome.message

    def test_what_hangs_times_out_and_later_samples_are_scored(self) -> None:
        self._needs_failures()
        self.needs("timeout")
        good = [self.sample(f"good{i}") for i in range(6)]
        with self.started() as manager:
            self.score(manager, good[:1])
            mixed = [self.sample("hung", fail="hang"), *good]
            outcomes = self.score(manager, mixed, endless=["hung"])
            hung = outcomes["hung"]
            assert isinstance(hung, Failure)
            assert hung.kind is FailureKind.TIMEOUT
            if not self.shares_calls:
                assert all(isinstance(outcomes[s.sample_id], Score) for s in good)
            failing_reward.release_hung()
            time.sleep(0.6)  # a blocked event loop is replaced after half a second
            after = self.score(manager, good)
            assert all(isinstance(outcome, Score) for outcome in after.values()), after

    def test_what_kills_its_process_fails_itself_alone(self) -> None:
        self._needs_failures()
        self.needs("processes")
        good = [self.sample(f"good{i}") for i in range(30)]
        bad = [self.sample(how, fail=how) for how in KINDS_OF_PROCESSES]
        mixed = [sample for pair in zip(good[::8], bad, strict=True) for sample in pair]
        mixed += [sample for sample in good if sample not in mixed]
        with self.started() as manager:
            outcomes = self.score(manager, mixed, endless=["hang", "spin"])
        kinds = {how: getattr(outcomes[how], "kind", outcomes[how]) for how in KINDS_OF_PROCESSES}
        assert kinds == KINDS_OF_PROCESSES
        assert all(isinstance(outcomes[s.sample_id], Score) for s in good)
        for how in ("crash", "kill"):
            failure = outcomes[how]
            assert isinstance(failure, Failure)
            assert failure.retryable

    def test_it_serves_several_rollouts_and_event_loops(self) -> None:
        with self.started() as manager:
            for round_ in range(3):
                outcomes = self.score(manager, [self.sample(f"r{round_}.{i}") for i in range(5)])
                found = [getattr(o, "value", o) for o in outcomes.values()]
                assert found == [self._near(1.0)] * 5

    def test_a_rollout_that_is_given_up_leaves_the_manager_usable(self) -> None:
        self._needs_failures()
        self.needs("timeout")

        async def give_up() -> None:
            scorer = Scorer(manager, timeout=PATIENCE)
            for i in range(4):
                scorer.add(self.sample(f"h{i}", fail="hang"), group=i, group_size=1)
            await asyncio.sleep(0.2)
            await scorer.cancel()

        with self.started() as manager:
            asyncio.run(give_up())
            failing_reward.release_hung()
            time.sleep(0.6)
            outcome = self.score(manager, [self.sample("after")])["after"]
        assert isinstance(outcome, Score), outcome

    def test_nothing_is_left_after_close(self) -> None:
        threads, processes = set(threading.enumerate()), _children()
        with self.started() as manager:
            self.score(manager, [self.sample(f"s{i}") for i in range(8)])
            if self.fails_on_demand:
                self.score(manager, [self.sample("bad", fail="exception")])
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and (
            set(threading.enumerate()) - threads or _children() - processes
        ):
            time.sleep(0.02)
        assert not set(threading.enumerate()) - threads
        assert not _children() - processes

    def _near(self, value: float) -> Any:
        """Return a `pytest.approx`, with the suite's tolerance, of the expected score if the reward function returns `value`."""
        return pytest.approx(self.expected(value), rel=0.0, abs=self.tolerance)

    def _needs_failures(self) -> None:
        if not self.fails_on_demand:
            pytest.skip("the suite has fails_on_demand = False: no row makes this manager fail")


def _children() -> set[int]:
    """Return the process ids of this process's children; empty if the system does not list them."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    if not tasks.is_dir():
        return set()
    found: set[int] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found
