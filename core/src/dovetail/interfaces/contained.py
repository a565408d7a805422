"""Protects the run from user code: SystemExit and the like become an Exception, and a process that user code forks ends."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_INSIDE = ContextVar("inside", default=False)
"""Whether the current task runs within `contained`, or was created there; tasks inherit the value."""


def as_exception(error: BaseException) -> Exception:
    """Return an error as an Exception: SystemExit and the like, which would end the run, become a RuntimeError."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"the function raised {type(error).__name__}({error})")
    return wrapped.with_traceback(error.__traceback__)


def error_text(error: BaseException) -> str:
    """Return an error's type and message, cut to 300 characters; Python's placeholder replaces the message if `str` fails."""
    # Lines of code come before it (SyntaxError), and notes after it.
    text = next(line for line in traceback.format_exception_only(error) if line[0] != " ").strip()
    return text if len(text) <= 300 else f"{text[:300]}…"


def outcome_of(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a user's function, and return `(result, None)`, or `(None, exception)` if the call failed."""
    process = os.getpid()
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - raised where the outcome is awaited
        return None, as_exception(error)
    finally:
        _end_fork(process)


async def contained(work: Awaitable[T]) -> T:
    """Await a user's coroutine, and return its result.

    Raises:
        Exception: the coroutine failed. SystemExit and the like become a RuntimeError.
        CancelledError: the awaiting task was cancelled.
    """
    process, loop, task, inside = (
        os.getpid(),
        asyncio.get_running_loop(),
        asyncio.current_task(),
        _INSIDE.get(),
    )
    _INSIDE.set(True)
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        cancelled = isinstance(error, asyncio.CancelledError) and task and task.cancelling()
        # If the current task is another one or None, Python is closing an unfinished coroutine (GeneratorExit).
        if cancelled or asyncio.current_task(loop) is not task:
            raise
        raise as_exception(error) from error.__cause__
    finally:
        _end_fork(process)
        _INSIDE.set(inside)


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Keep tasks from disturbing the event loop by forks and by SystemExit.

    A child process that a task forks never runs the loop: it exits when its copy of the task yields.
    In tasks that user code creates within `contained`, SystemExit and KeyboardInterrupt become a RuntimeError instead of ending the loop.
    """
    loop.set_task_factory(
        lambda loop, work, **settings: asyncio.Task(_Steps(work), loop=loop, **settings)
    )


class _Steps(Coroutine[Any, Any, Any]):
    """The coroutine of a task, which checks for forks and SystemExit after each step."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work, self._process, self._inside = work, os.getpid(), _INSIDE.get()

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        # asyncio's task dumps show the coroutine's name, code and frame.
        return getattr(self._work, name)

    def _step(self, advance: Callable[..., Any], *given: Any) -> Any:
        try:
            return advance(*given)
        except (SystemExit, KeyboardInterrupt) as error:
            if not self._inside:
                raise
            raise as_exception(error) from error.__cause__
        finally:
            _end_fork(self._process)


def _end_fork(process: int) -> None:
    """Exit if this process is not `process` but a forked child: a child must not go on with its parent's work."""
    if os.getpid() != process:
        os._exit(0)
