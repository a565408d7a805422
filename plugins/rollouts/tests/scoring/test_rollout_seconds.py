"""BusyTime: overlapping entries count once in `seconds`, and each in `total`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dovetail_rollouts.rollout_seconds import BusyTime


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))),
        max_size=8,
    )
)
def test_seconds_are_those_in_which_at_least_one_entry_was_open_and_the_total_is_of_all(
    spans: Any,
) -> None:
    now = 0.0
    busy = BusyTime(lambda: now)
    events = [(begin, 0) for begin, _ in spans] + [(end, 1) for _, end in spans]
    for moment, ends in sorted(events):
        now = moment
        busy.__exit__() if ends else busy.__enter__()
    covered = {second for begin, end in spans for second in range(begin, end)}
    assert busy.seconds == len(covered)
    assert busy.total == sum(end - begin for begin, end in spans)


def test_an_entry_that_is_still_open_counts_up_to_now() -> None:
    now = 1.0
    busy = BusyTime(lambda: now)
    with busy:
        now = 3.0
        assert busy.seconds == 2.0
        now = 4.0
    now = 9.0
    assert busy.seconds == 3.0


def test_an_entry_that_fails_is_closed() -> None:
    moments = iter([1.0, 4.0, 4.0])
    busy = BusyTime(lambda: next(moments))
    with pytest.raises(ValueError, match="no"), busy:
        raise ValueError("no")
    assert busy.seconds == 3.0


def test_tasks_of_one_loop_may_overlap(scripted) -> None:
    async def main() -> float:
        busy = BusyTime(asyncio.get_running_loop().time)

        async def one(begin: float, seconds: float) -> None:
            await asyncio.sleep(begin)
            with busy:
                await asyncio.sleep(seconds)

        await asyncio.gather(one(0.0, 3.0), one(2.0, 2.0), one(6.0, 1.0))
        return busy.seconds

    assert scripted.until_done(main()) == pytest.approx(5.0)
