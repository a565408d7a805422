"""A worker process of `parallel`: makes the reward functions for itself, and scores what it is sent in its main thread."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any

from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    RewardFunctions,
    failure_from,
    outcome_from,
)
from dovetail.plugins import load_plugin_class
from dovetail_rewards.managers.function_manager import function_of
from dovetail_rewards.managers.wire import frame, pack_outcome, receive

READY = b"ready"
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve one manager until it closes the connection.

    Args:
        descriptor: of the socket to the manager.
        parent: process id of the manager.
    """
    _end_with(parent)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a function prints is no answer of ours, and belongs beside the log
    connection = socket.socket(fileno=descriptor)
    setup = receive(connection)
    if setup is None:
        return
    try:
        functions = _functions(setup)
    except BaseException as error:  # noqa: BLE001 - told to the manager, whatever it is
        text = traceback.format_exception_only(error)[-1].strip()
        _send(connection, json.dumps(text).encode())
        return
    _send(connection, READY)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        while (chunk := receive(connection)) is not None:
            for number, sample in pickle.loads(chunk):  # noqa: S301 - from the process that started this one
                _send(connection, pack_outcome(number, _score(functions, sample, loop)))


def _functions(setup: bytes) -> RewardFunctions:
    files, functions = pickle.loads(setup)  # noqa: S301 - from the process that started this one
    for ref in files:
        load_plugin_class(ref)  # classes of these files can be unpickled from here on
    made: RewardFunctions = pickle.loads(functions)  # noqa: S301
    return made


def _score(functions: RewardFunctions, pickled: bytes, loop: asyncio.AbstractEventLoop) -> Outcome:
    try:
        arguments = pickle.loads(pickled)  # noqa: S301
    except Exception as error:  # noqa: BLE001 - whatever a row holds
        text = f"the row can't be had in a worker process: {type(error).__name__}: {error}"
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


def _send(connection: socket.socket, payload: bytes) -> None:
    try:
        connection.sendall(frame(payload))
    except OSError:  # the manager is gone
        os._exit(0)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even where a function never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)
