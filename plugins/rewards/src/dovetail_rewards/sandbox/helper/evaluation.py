"""Assert tests in two processes: the response's evaluates calls, the tests' compares; only plain data passes between them.

The programs of the two are a call of `run_answer` and one of `run_tests`. A value that is no plain data stays in the
response's process; the tests hold an `AnswerObject` in its place, which compares with nothing, so that no `__eq__` of the
response decides a test.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from .answer_object import FIX, AnswerObject
from .plain_data import MessageSocket, decode, encode

_ALIASES = {"np": "numpy", "pd": "pandas"}
_MODULE = "solution"


class TestsError(Exception):
    """The tests can't be run in a process of their own."""


class AnswerLostError(BaseException):
    """The response's process has ended, or sent what is no reply."""


def limit(seconds: float, clock_factor: float) -> None:
    """Have the kernel end this process after so many seconds of CPU, or a multiple of them on the clock."""
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * clock_factor)


# The response's process


class AnswerServer:
    """Does what the tests ask with the objects of the response's module.

    Args:
        module: the response's.
        task: `seconds` and `clock` of a test.
    """

    def __init__(self, module: types.ModuleType, task: Mapping[str, Any]) -> None:
        self._module, self._task = module, task
        self._objects: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self._operations: dict[str, Callable[..., object]] = {
            "call": lambda function, /, *args, **named: function(*args, **named),
            "bool": bool,
            "delattr": delattr,
            "getattr": getattr,
            "getitem": operator.getitem,
            "iter": iter,
            "len": len,
            "next": next,
            "repr": repr,
            "setattr": setattr,
            "setitem": operator.setitem,
            "str": str,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request: `value`, `raised` or what `_look_up` gives; with `arguments` where they changed."""
        if request["do"] == "limit":
            limit(self._task["seconds"], self._task["clock"])
            return {}
        if request["do"] == "name":
            return self._look_up(request["name"])
        args, named = (decode(request[key], self._kept) for key in ("args", "named"))
        try:
            value = self._operations[request["do"]](*args, **named)
            reply = {"value": self._encoded(value)}
        except BaseException as error:  # noqa: BLE001 - whatever a response raises
            reply = self.raised(error)
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
            return {"exception": _ancestors(value)}
        return {"value": self._encoded(value)}

    def raised(self, error: BaseException) -> dict[str, Any]:
        """Return the reply that raises this in the tests: its type by name, and its arguments."""
        try:
            args = self._encoded(error.args)
        except BaseException:  # noqa: BLE001
            args = ["tuple", "its arguments can't be sent"]
        return {"raised": _ancestors(type(error)), "args": args}

    def _encoded(self, value: object) -> Any:
        return encode(value, self._keep, exact=False)

    def _keep(self, value: object) -> list[Any]:
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._objects[number] = value
        return ["reference", number, type(value).__name__]

    def _kept(self, number: int, _: str) -> object:
        return self._objects[number]


def _ancestors(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__]


def run_answer(task: Mapping[str, Any]) -> NoReturn:
    """Run `prelude` and `source` of the task, and then do what the tests ask until they end."""
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
        except ValueError as error:
            channel.send(server.raised(error))
    os._exit(0)  # threads of the response are not waited for


def _module() -> types.ModuleType:
    module = types.ModuleType(_MODULE)
    module.__dict__["__builtins__"] = builtins
    sys.modules[_MODULE] = module
    return module


# The tests' process


class AnswerClient:
    """Asks the response's process.

    Args:
        channel: to it.
    """

    def __init__(self, channel: MessageSocket) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[BaseException]] = {}
        self.lost = False
        """Whether it has ended: no test under way then holds, whatever it caught."""

    def ask(self, what: str, /, *args: object, **named: object) -> Any:
        """Return what the response's process makes of objects of its own and of plain data.

        Raises:
            TestsError: an argument is no plain data, or too long.
            AnswerLostError: there is no reply.
            BaseException: what was raised there: of the same built-in type and arguments.
        """
        encoded = [encode(part, _reference, exact=True) for part in (list(args), named)]
        reply = self.exchange({"do": what, "args": encoded[0], "named": encoded[1]})
        with self._reading():
            if "arguments" in reply:
                changed, changed_named = (self._decoded(part) for part in reply["arguments"])
                for ours, theirs in (
                    *zip(args, changed, strict=True),
                    *((named[key], changed_named[key]) for key in named),
                ):
                    _change(ours, theirs)
            if "raised" not in reply:
                return self._decoded(reply["value"])
            error = self._error(reply["raised"], self._decoded(reply["args"]))
        raise error

    def resolve(self, name: str, namespace: dict[str, Any]) -> None:
        """Put the object that the response's module holds under this name into a namespace, if there is one.

        What the response imported is imported here, under its own name alone.
        """
        reply = self.exchange({"do": "name", "name": name})
        with self._reading():
            if "value" in reply:
                namespace[name] = self._decoded(reply["value"])
            elif "exception" in reply:
                namespace[name] = self._exception(reply["exception"])
            elif "attribute" in reply or reply.get("module") == _ALIASES.get(name, name):
                try:
                    module = importlib.import_module(reply["module"])
                    namespace[name] = getattr(module, name) if "attribute" in reply else module
                except (ImportError, AttributeError):
                    pass

    def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            TestsError: the request is too long.
            AnswerLostError: there is no reply.
        """
        if self.lost:
            raise AnswerLostError
        with self._reading():
            try:
                self._channel.send(request)
            except ValueError as error:
                raise TestsError(
                    f"they give the response an argument that is too long ({error}): {FIX}"
                ) from error
            reply = self._channel.receive()
            if reply is None:
                raise AnswerLostError
            return reply

    def _reading(self) -> _Reading:
        return _Reading(self)

    def _decoded(self, data: Any) -> Any:
        return decode(data, lambda number, kind: AnswerObject(self, int(number), str(kind)))

    def _error(self, names: list[str], args: Iterable[object]) -> BaseException:
        kind = self._exception(names)
        try:
            return kind(*args)
        except TypeError:
            return Exception(f"{names[0]}: {args}")

    def _exception(self, names: list[str]) -> type[BaseException]:
        """The built-in exception of that name; for another one a class of its own below the nearest built-in one."""
        found = (getattr(builtins, name, None) for name in names)
        nearest = next(
            kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseException)
        )
        if nearest.__name__ == names[0]:
            return nearest
        return self._exceptions.setdefault(names[0], type(names[0], (nearest,), {}))


class _Reading:
    """Whatever a reply that is none raises while it is read, the response's process counts as lost."""

    def __init__(self, client: AnswerClient) -> None:
        self._client = client

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, TestsError):
            self._client.lost = True
            raise AnswerLostError from error


def _reference(value: object) -> list[Any]:
    if isinstance(value, AnswerObject):
        return ["reference", *object.__getattribute__(value, "_key")]
    raise TestsError(
        f"they give the response a value of type {type(value).__name__}, which can't be sent to its process: {FIX}"
    )


def _change(ours: Any, theirs: Any) -> None:
    """Change an argument as the response changed its copy of it."""
    if isinstance(ours, (list, bytearray)):
        ours[:] = theirs
    elif isinstance(ours, (dict, set, collections.deque)):
        ours.clear()
        (ours.extend if isinstance(ours, collections.deque) else ours.update)(theirs)


def run_tests(task: Mapping[str, Any]) -> None:
    """Run each text of `cases` after `prelude`, and print a line of JSON for each: `held` is the token, or `error`.

    The response's objects of the names in `names` are there.
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

    module.__dict__["__getattr__"] = resolve  # for `from solution import …`
    try:
        for name in set(task["names"]) - set(module.__dict__):
            client.resolve(name, module.__dict__)
        for number, test in enumerate(task["cases"]):
            limit(task["seconds"], task["clock"])
            client.exchange({"do": "limit"})
            outcome = _outcome(test, module.__dict__, task["token"])
            if client.lost:
                return
            os.write(told, (json.dumps({"case": number, **outcome}) + "\n").encode())
    except AnswerLostError:
        return


def _outcome(test: str, namespace: dict[str, Any], token: str) -> dict[str, str]:
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)  # noqa: S102
    except TestsError as error:
        return {"fault": str(error)}
    except BaseException as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"held": token}
