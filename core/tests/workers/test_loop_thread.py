"""LoopThread: work is handed over, its results and errors come back, and whatever ends the loop is known."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dovetail.workers.loop_thread import LoopThread


async def thread() -> str:
    return threading.current_thread().name


async def fails() -> None:
    raise ValueError("a bug")


async def leaves() -> None:
    raise SystemExit("the engine left")


def until(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_work_runs_in_the_thread_and_its_results_and_errors_come_back() -> None:
    loop = LoopThread("of-a-test")
    assert loop.start(thread()).result(20) == loop.wait(thread()) == "of-a-test"
    assert asyncio.run(loop.run(thread())) == "of-a-test"
    with pytest.raises(ValueError, match="a bug"):
        loop.wait(fails())
    assert loop.alive
    assert loop.failure is None
    loop.close()


def test_what_takes_longer_than_its_time_out_is_cancelled() -> None:
    loop = LoopThread("of-a-test")
    ended = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.wait(long(), 0.05)
    assert ended.wait(20)
    loop.close()


def test_closing_cancels_what_runs_and_ends_the_thread_however_often() -> None:
    loop = LoopThread("of-a-test")
    future = loop.start(asyncio.sleep(600))
    loop.close()
    assert not loop.alive
    assert loop.failure is None
    assert future.cancelled()
    loop.close()


def test_what_ends_the_loop_is_known_and_everything_else_is_cancelled() -> None:
    loop = LoopThread("of-a-test")
    beside = loop.start(asyncio.sleep(600))
    loop.start(leaves())
    until(lambda: not loop.alive)
    assert isinstance(loop.failure, SystemExit)
    until(beside.done)
    assert beside.cancelled()
    loop.close()
