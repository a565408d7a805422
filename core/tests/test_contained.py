"""Code of a user on a loop of the run ends neither the loop nor, in a process that it forked, goes on with what is its parent's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from dovetail.errors import ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall, contained, outcome_of
from dovetail.interfaces.contained import error_text
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail.workers.loop_thread import LoopThread
from dovetail_agents import ToolSet

LEAVING = [
    asyncio.CancelledError(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseExceptionGroup("several", [SystemExit(3)]),
]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("of-a-test")
    yield made
    made.close()


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await asyncio.sleep(0)
        raise error

    return run


@pytest.mark.parametrize("error", LEAVING, ids=repr)
def test_what_is_no_exception_becomes_one_and_the_loop_stays(loop, error):
    run = raising(error)

    async def in_a_task() -> None:
        await asyncio.gather(asyncio.create_task(run()), asyncio.sleep(0.01))

    for work in (run, in_a_task):
        # A task that ends with a CancelledError of its own is cancelled: its awaiter gets another one, without a text.
        with pytest.raises(Exception, match=type(error).__name__):
            loop.wait(contained(work()), 20)
        assert loop.alive


@pytest.mark.parametrize("error", LEAVING, ids=repr)
def test_a_function_in_a_thread_that_leaves_returns_an_exception(error):
    def leave() -> None:
        raise error

    _, found = outcome_of(leave)
    assert isinstance(found, Exception)
    assert type(error).__name__ in str(found)


def test_exceptions_and_results_pass_as_they_are(loop):
    async def seven() -> int:
        return 7

    assert loop.wait(contained(seven())) == 7
    with pytest.raises(ToolError, match="as it is"):
        loop.wait(contained(raising(ToolError("as it is"))()))


def test_a_real_cancellation_ends_it_at_once_also_after_a_time_limit_within(loop):
    async def wait() -> None:
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0.01)
        except TimeoutError:
            await asyncio.sleep(60)

    async def cancelled() -> bool:
        task = asyncio.create_task(contained(wait()))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    began = time.monotonic()
    assert loop.wait(cancelled(), 20)
    assert time.monotonic() - began < 10


def test_code_that_never_ended_is_cleared_away_without_an_error(recwarn):
    async def forever() -> None:
        await asyncio.Event().wait()

    async def begin() -> Any:
        work = contained(forever())
        work.send(None)
        return work

    work = asyncio.run(begin())
    work.close()
    del work
    gc.collect()
    assert not recwarn.list


def test_a_task_that_is_cancelled_before_it_begins_leaves_no_warning(loop, recwarn):
    async def cancel() -> None:
        asyncio.create_task(asyncio.sleep(60)).cancel()
        await asyncio.sleep(0)

    loop.wait(cancel())
    gc.collect()
    assert not recwarn.list


def ended(child: int) -> None:
    """Wait until a forked process has ended."""
    for _ in range(2000):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child was still running")


FORK = '''
import asyncio, os, tempfile

CHILDREN = []


def fork():
    child = os.fork()
    CHILDREN.append(child)
    return child == 0


async def returns():
    """Fork, and return in both processes."""
    fork()
    return "well"


async def fails():
    """Fork, and raise in the child."""
    if fork():
        raise ValueError("in the child")
    return "well"


async def leaves():
    """Fork, and leave in the child."""
    if fork():
        raise SystemExit(3)
    return "well"


async def stays():
    """Fork, and give the loop back in the child, again and again."""
    if fork():
        while True:
            await asyncio.sleep(0)
    return "well"


async def waits():
    """Fork, and wait in the child for what was there before."""
    event = asyncio.Event()
    if fork():
        await event.wait()
    return "well"


async def branches():
    """Fork in a task of its own."""
    return (await asyncio.gather(returns(), asyncio.sleep(0.01)))[0]


def threaded():
    """Fork in a thread."""
    fork()
    return "well"
'''


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["returns", "fails", "leaves", "stays", "waits", "branches", "threaded"]
)
def test_a_process_that_a_tool_forks_ends_and_does_nothing_of_its_parents(tmp_path, loop, name):
    (tmp_path / "forks.py").write_text(FORK)
    section = PluginSection(path=str(tmp_path / "forks.py"), attribute=name)
    tool: Any = make_plugin(ref_for("tool", section), PluginContext())
    beside = tmp_path / "beside"

    async def run() -> list[str]:
        async def other() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
                with beside.open("a") as file:
                    file.write(f"{os.getpid()}\n")

        async def episode() -> str:
            async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
                result = await tools.call(ToolCall(id="c", name=name, arguments={}))
            return str(result.content)

        found = await asyncio.gather(episode(), *(other() for _ in range(20)))
        return [one for one in found if one]

    assert loop.wait(run(), 60) == ["well"]
    [child] = tool.function.__globals__["CHILDREN"]
    ended(child)
    assert set(beside.read_text().split()) == {str(os.getpid())}


def noted(error: Exception) -> Exception:
    error.add_note("a note\nof two lines")
    return error


def unreadable() -> SyntaxError:
    with pytest.raises(SyntaxError) as raised:
        compile("a b", "function.py", "exec")
    return raised.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("3 apples"), "ValueError: 3 apples"),
        (noted(ValueError("3 apples")), "ValueError: 3 apples"),
        (ValueError("two\nlines"), "ValueError: two\nlines"),
        (KeyError(), "KeyError"),
        (unreadable(), "SyntaxError: invalid syntax"),
        (ValueError("x" * 400), f"ValueError: {'x' * 288}…"),
    ],
)
def test_an_error_is_told_by_its_type_and_message(error: Exception, text: str) -> None:
    assert error_text(error) == text
