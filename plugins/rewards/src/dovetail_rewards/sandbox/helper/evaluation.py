"""Assert tests in two processes: the response's process runs the response's code, the tests' process compares its results.

The response's process runs `run_answer`, the tests' process `run_tests`. They exchange only plain data. A value that is not plain data
stays in the response's process. The tests get an `AnswerObject` in its place, which refuses comparisons, so that no `__eq__` of the
response decides a test.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .answer_client import TEXT, AnswerClient, AnswerLostError, refusal
from .answer_object import FIX, TypeOfCopy
from .plain_data import MessageSocket, change, decode, encode

_MODULE = "solution"


def limit(seconds: float, clock_factor: float) -> None:
    """Let the kernel end this process after `seconds` of CPU time or `seconds * clock_factor` of wall-clock time."""
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * clock_factor)


# The response's process


class AnswerServer:
    """Performs the tests' operations on objects of the response's module, in the response's process.

    Args:
        module: the response's module.
        task: the mapping with a test's time limit (`seconds`) and wall-clock factor (`clock`).
    """

    def __init__(self, module: types.ModuleType, task: Mapping[str, Any]) -> None:
        self._module, self._task = module, task
        self._objects: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self._imported: dict[int, list[Any]] = {}
        self._operations: dict[str, Callable[..., object]] = {
            "change": lambda owner, name, value: change(getattr(owner, name), value),
            "call": lambda function, /, *args, **named: function(*args, **named),
            "bool": bool,
            "contains": operator.contains,
            "delattr": delattr,
            "delitem": operator.delitem,
            "format": format,
            "getattr": getattr,
            "getitem": operator.getitem,
            "isinstance": lambda kind, value: isinstance(value, kind),
            "iter": iter,
            "len": len,
            "next": next,
            "repr": repr,
            "reversed": reversed,
            "setattr": setattr,
            "setitem": operator.setitem,
            "str": str,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request: the `value` or the `raised` exception of an operation, or the object of a requested name.

        If the result can't be sent, the reply has only `refused`. If the operation changed its arguments, the reply also has `arguments`.
        """
        try:
            return self._answer(request)
        except BaseException as error:  # noqa: BLE001 - a cycle, a depth or a length that can't be sent
            return refusal(error)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "limit":
            limit(self._task["seconds"], self._task["clock"])
            return {}
        if request["do"] == "name":
            return self._look_up(request["name"])
        args, named = (decode(request[key], self._kept) for key in ("args", "named"))
        try:
            value = self._operations[request["do"]](*args, **named)
        except BaseException as error:  # noqa: BLE001 - whatever a response raises
            reply = self._raised(error)
        else:
            reply = {"value": self._encoded(value)}
        arguments = self._encoded([args, named])[1:]
        if arguments != [request["args"], request["named"]]:
            reply["arguments"] = arguments
        return reply

    def _look_up(self, name: str) -> dict[str, Any]:
        names = self._module.__dict__
        if name not in names:
            return {}
        value = names[name]
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        home = getattr(value, "__module__", None)
        if (
            isinstance(home, str)
            and home != _MODULE
            and getattr(sys.modules.get(home), name, None) is value
        ):
            return {"module": home, "attribute": name}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": _lineage(value)}
        return {"value": self._encoded(value)}

    def _raised(self, error: BaseException) -> dict[str, Any]:
        """Return the reply that raises an error in the tests: the names of its class and base classes, arguments, attributes and text."""
        return {
            "raised": _lineage(type(error)),
            "args": self._encoded(error.args),
            "attributes": self._encoded({**vars(error), TEXT: str(error)}),
        }

    def _encoded(self, value: object) -> Any:
        return encode(value, self._keep, exact=False)

    def _keep(self, value: object) -> list[Any]:
        if id(value) in self._imported:
            return self._imported[id(value)]
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._objects[number] = value
        return ["reference", number, type(value).__name__]

    def _kept(self, key: int | str, name: str) -> object:
        if isinstance(key, int):
            return self._objects[key]
        value: object = getattr(importlib.import_module(key), name)
        self._imported[id(value)] = ["import", key, name]
        self._objects[-len(self._imported)] = value  # a reference, so that its id stays unique
        return value


def _lineage(kind: type) -> list[Any]:
    """Return `[module, name, *lineages of the bases]` of an exception class, down to built-in classes."""
    if kind.__module__ == "builtins":
        return ["builtins", kind.__name__]
    bases = (base for base in kind.__bases__ if issubclass(base, BaseException))
    return [str(kind.__module__), kind.__name__, *map(_lineage, bases)]


def run_answer(task: Mapping[str, Any]) -> NoReturn:
    """Run the response's code, and then serve the requests of the tests' process until it ends.

    Args:
        task: a mapping with `prelude`, the source of set-up code to run first, `source`, the response's code, and the limits of
            `AnswerServer`.
    """
    channel = MessageSocket()
    os.dup2(2, 1)
    module = _module()
    exec(task["prelude"], module.__dict__)  # noqa: S102 - what the sandbox is for
    exec(compile(task["source"], "solution.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    server = AnswerServer(module, task)
    while (request := channel.receive()) is not None:
        reply = server.answer(request)
        try:
            channel.send(reply)
        except (ValueError, RecursionError) as error:
            channel.send(refusal(error))
    os._exit(0)  # without waiting for the response's threads


def _module() -> types.ModuleType:
    module = types.ModuleType(_MODULE)
    module.__dict__["__builtins__"] = builtins
    sys.modules[_MODULE] = module
    return module


# The tests' process


def run_tests(task: Mapping[str, Any]) -> None:
    """Run the task's `prelude` (the source of set-up code), then each test in `cases`, and print one line of JSON per test.

    The line of a test that passed has the task's `token` under `held`: a random text, which only this process gets, so that the response
    can't report a test as passed. Any other line has `error`, or `fault` if the tests can't run in a separate process. The tests can
    use those objects of the response that the task's `names` lists.
    """
    channel = MessageSocket()
    told = os.dup(1)
    os.dup2(2, 1)
    module = _module()
    exec(task["prelude"], module.__dict__)  # noqa: S102 - what the sandbox is for
    client = AnswerClient(channel)

    def resolve(name: str) -> object:
        client.resolve(name, module.__dict__)
        if name in module.__dict__:
            return module.__dict__[name]
        raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = resolve  # resolves names for `from solution import …`
    try:
        for name in set(task["modules"]) - set(module.__dict__):
            client.import_module(name, module.__dict__)
        for name in set(task["names"]) - set(task["modules"]) - set(module.__dict__):
            client.resolve(name, module.__dict__)
        module.__dict__.setdefault("type", TypeOfCopy)
        for number, test in enumerate(task["cases"]):
            limit(task["seconds"], task["clock"])
            client.exchange({"do": "limit"})
            outcome = _outcome(test, module.__dict__, task["token"], client)
            if client.lost:
                return
            os.write(told, (json.dumps({"case": number, **outcome}) + "\n").encode())
    except AnswerLostError:
        return


def _outcome(
    test: str, namespace: dict[str, Any], token: str, client: AnswerClient
) -> dict[str, str]:
    """Run a test and return `held`, `error` or `fault` for its line of output (see `run_tests`).

    If the client refused one of the test's operations, the test fails, even if its code caught the client's exception.
    """
    outcome = {"held": token}
    client.refused, client.stops = "", "StopIteration" in test
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)  # noqa: S102
    except BaseException as error:  # noqa: BLE001
        outcome = {"error": f"{type(error).__name__}: {error}"[:300]}
        if isinstance(error, AttributeError):
            outcome["error"] += (
                f" (if the attribute is missing only in a copy of the response's value, {FIX})"
            )
    if client.refused:
        return {"error": client.refused}
    return {"fault": client.fault} if client.fault else outcome
