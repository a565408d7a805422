"""A worker process of `parallel`, which constructs the reward functions itself and scores samples in its main thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import inspect
import io
import json
import os
import pickle
import signal
import sys
import traceback
from typing import Any

from dovetail.interfaces import Failure, FailureKind, Outcome
from dovetail.plugins import load_plugin_class
from dovetail_rewards.managers.function_manager import function_of
from dovetail_rewards.managers.wire import pack_outcome
from dovetail_rollouts import RewardFunctions, failure_from, outcome_from

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Answer the requests of a ProcessPool until standard input ends.

    Args:
        parent: process id of the process that owns the pool.
    """
    _end_with(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keep a function's prints out of the replies
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    own, functions = os.getpid(), None
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for line in requests:
            request = json.loads(line)
            reply: dict[str, str] = {}
            if functions is None:
                try:
                    functions = _functions(base64.b64decode(request["setup"]))
                except BaseException as error:  # noqa: BLE001 - the pool gets it, whatever it is
                    reply["error"] = "".join(traceback.format_exception_only(error)).strip()
            else:
                _seed(request["seed"])
                outcome = _score(functions, base64.b64decode(request["sample"]), loop)
                reply["outcome"] = pack_outcome(outcome)
            if os.getpid() != own:
                os._exit(
                    0
                )  # a child that a function forked has returned here; its result is not a score
            try:
                replies.write(json.dumps({"number": request["number"], **reply}).encode() + b"\n")
                replies.flush()
            except OSError:  # the pool's process has ended
                os._exit(0)


def _functions(setup: bytes) -> RewardFunctions:
    files, functions = pickle.loads(setup)  # noqa: S301 - from the process that started this one
    for ref in files:
        load_plugin_class(ref)  # load the file first, so that its classes can be unpickled
    return pickle.loads(functions)  # noqa: S301


def _seed(seed: int) -> None:
    """Seed torch's CPU generator for one sample, so that the score does not depend on the worker or the order."""
    torch = sys.modules.get("torch")  # importing it here would cost every worker seconds and memory
    if torch is not None:
        torch.default_generator.manual_seed(seed)


def _score(functions: RewardFunctions, pickled: bytes, loop: asyncio.AbstractEventLoop) -> Outcome:
    try:
        arguments = pickle.loads(pickled)  # noqa: S301
    except Exception as error:  # noqa: BLE001 - whatever a row holds
        text = f"the row can't be loaded in a worker process: {type(error).__name__}: {error}"
        return Failure(kind=FailureKind.EXCEPTION, message=text)
    call = function_of(functions, arguments["data_source"])
    if isinstance(call, Failure):
        return call
    try:
        value = call.with_arguments(arguments)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(_awaited(value))
        return outcome_from(value, call.name)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, SystemExit too
        return failure_from(error, call)


async def _awaited(value: Any) -> Any:
    return await value


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if a function never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(0)
