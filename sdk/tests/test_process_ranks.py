"""Ranks in real processes: functions and worker groups over these ranks, and their failures."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from dovetail.dispatch import Mesh
from dovetail.errors import WorkerError
from dovetail_sdk.testing.processes import ProcessRanks, Rank


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with ProcessRanks(2) as started:
        yield started


def sum_of_ranks(rank: Rank, values: np.ndarray) -> np.ndarray:
    from dovetail.workers import reduction_over

    return reduction_over(Mesh(dp=rank.world), rank.rank).sum(values * (rank.rank + 1))


def fail_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("rank 1 does not like this")


def sleep_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(600)


@pytest.mark.parametrize("values", [np.arange(6.0).reshape(2, 3), np.float32(2.5), np.arange(3)])
def test_a_sum_over_ranks_keeps_shape_and_dtype(ranks: ProcessRanks, values: np.ndarray) -> None:
    first, second = ranks.run(sum_of_ranks, np.asarray(values))
    assert np.array_equal(first, np.asarray(values) * 3)
    assert first.dtype == np.asarray(values).dtype
    assert first.shape == np.shape(values)
    assert first.tobytes() == second.tobytes()


def test_a_failure_arrives_with_the_rank_and_its_traceback(ranks: ProcessRanks) -> None:
    with pytest.raises(ValueError, match=r"rank 1 does.*like this") as caught:
        ranks.run(fail_on_one)
    assert any("rank 1 of 2" in note and "fail_on_one" in note for note in caught.value.__notes__)


def test_a_rank_that_hangs_is_named_and_all_are_ended() -> None:
    with ProcessRanks(2) as started:
        started.run(sum_of_ranks, np.ones(1))  # both ranks have then imported this module
        with pytest.raises(WorkerError, match=r"ranks \[1\] .* died or did not answer"):
            started.run(sleep_on_one, timeout=3.0)
        assert not any(
            process.is_alive() for process in started._processes if process.join(60) is None
        )
