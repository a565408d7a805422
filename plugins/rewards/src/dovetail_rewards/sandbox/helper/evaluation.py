"""Assert tests in two processes: the response's evaluates calls, the tests' compares; only plain data passes between them.

The programs of the two are a call of `run_answer` and one of `run_tests`. A value that is no plain data stays in the
response's process; the tests hold an `AnswerObject` in its place, which compares with nothing, so that no `__eq__` of the
response decides a test.
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import decimal
import fractions
import importlib
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 8 << 20
"""Bytes of one message; the response's process is given up where it sends more."""
_ALIASES = {"np": "numpy", "pd": "pandas"}
_SCALARS = (str, int, float)
_ATOMS = frozenset({type(None), bool, *_SCALARS})
_PAIRS = (collections.OrderedDict, collections.Counter, dict)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_REDUCED = (
    fractions.Fraction,
    decimal.Decimal,
    range,
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
)
"""Types whose `__reduce__` gives the constructor's arguments as plain data."""
_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (*_PAIRS, *_SEQUENCES, *_REDUCED, complex, bytes, bytearray)
}
_MODULE = "solution"
_FIX = "set tests=in_process"


class TestsError(Exception):
    """The tests can't be run in a process of their own."""


class NotPlainError(TypeError):
    """The tests do with a value of the response what only its own process could do."""


class AnswerLostError(BaseException):
    """The response's process has ended, or sent what is no reply."""


def encode(value: object, keep: Callable[[object], list[Any]], *, exact: bool) -> Any:
    """Return a value as JSON values: a list is `[type, *items]`.

    Args:
        value: any object.
        keep: returns what stands for a value that is no plain data, or raises.
        exact: subclasses of the plain types are no plain data; otherwise they become what they derive from.
    """
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind in _REDUCED:
        return [
            kind.__name__,
            *(encode(part, keep, exact=exact) for part in kind.__reduce__(value)[1]),
        ]
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, exact=exact)
    for base in (*_PAIRS, *_SEQUENCES):
        if kind is base or (not exact and isinstance(value, base)):
            items: Any = base.items(value) if base in _PAIRS else base.__iter__(value)  # type: ignore[arg-type]
            # most items are scalars: a call for each would take most of the time of a long list
            return [
                base.__name__,
                *(
                    item if type(item) in _ATOMS else encode(item, keep, exact=exact)
                    for item in items
                ),
            ]
    if isinstance(value, (bytes, bytearray)):
        return [kind.__name__, *value] if kind in (bytes, bytearray) else keep(value)
    if kind is complex:
        return ["complex", value.real, value.imag]  # type: ignore[attr-defined]
    if not exact and isinstance(value, _SCALARS):
        scalar = next(scalar for scalar in _SCALARS if isinstance(value, scalar))
        return getattr(scalar, f"__{scalar.__name__}__")(value)
    return keep(value)


def decode(data: Any, kept: Callable[..., object]) -> Any:
    """Return the value that `encode` made this of; `kept` gives the object that a reference stands for."""
    if not isinstance(data, list):
        return data
    name, *parts = data
    if name == "reference":
        return kept(*parts)
    kind = _TYPES[name]
    values = [decode(part, kept) if type(part) is list else part for part in parts]
    if kind is collections.Counter:
        return kind(dict(values))
    return kind(*values) if kind in (*_REDUCED, complex) else kind(values)


class Channel:
    """Lines of JSON on standard input, a socket, which nothing else in this process reads from then on."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        self._file = open(self._fd, "rb", closefd=False)  # noqa: SIM115 - for as long as the process lives
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            ValueError: it has more than `MAX_MESSAGE_BYTES`.
            OSError: the other process has ended.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        while data:
            data = data[os.write(self._fd, data) :]

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None where there is none.

        Raises:
            ValueError: it is no message.
        """
        line = self._file.readline(MAX_MESSAGE_BYTES + 1)
        if not line:
            return None
        message = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(message, dict):
            raise ValueError("it is no message")  # noqa: TRY004 - as JSON that is none
        return message


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
    channel = Channel()
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

    def __init__(self, channel: Channel) -> None:
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
                    f"they give the response an argument that is too long ({error}): {_FIX}"
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
        f"they give the response a value of type {type(value).__name__}, which can't be sent to its process: {_FIX}"
    )


def _change(ours: Any, theirs: Any) -> None:
    """Change an argument as the response changed its copy of it."""
    if isinstance(ours, (list, bytearray)):
        ours[:] = theirs
    elif isinstance(ours, (dict, set, collections.deque)):
        ours.clear()
        (ours.extend if isinstance(ours, collections.deque) else ours.update)(theirs)


class AnswerObject:
    """Stands for an object of the response's process that is no plain data: a function, an instance, an iterator.

    What is asked of it is done there, and gives plain data or another one. It compares with nothing.
    """

    __slots__ = ("_client", "_key")

    def __init__(self, client: AnswerClient, number: int, kind: str) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_key", (number, kind))

    def _ask(self, what: str, /, *args: object, **named: object) -> Any:
        return object.__getattribute__(self, "_client").ask(what, self, *args, **named)

    def __call__(self, /, *args: object, **named: object) -> Any:
        return self._ask("call", *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", name)

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("setitem", key, value)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: AnswerObject, *_: object) -> Any:
        kind = object.__getattribute__(self, "_key")[1]
        raise NotPlainError(
            f"the response gave a value of type {kind}, which is no plain data: the tests' process can't evaluate "
            f"{name} of it; {_FIX} if the response may decide it"
        )

    return refuse


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash"),
    *(
        f"{side}{one}"
        for side in ("", "r")
        for one in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    ),
    *("neg", "abs", "round", "int", "float", "index", "complex"),
):
    setattr(AnswerObject, f"__{_name}__", _refused(f"__{_name}__"))


def run_tests(task: Mapping[str, Any]) -> None:
    """Run each text of `cases` after `prelude`, and print a line of JSON for each: `held` is the token, or `error`.

    The response's objects of the names in `names` are there.
    """
    channel = Channel()
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
