"""AnswerClient: lets assert tests use the objects of a response whose code runs in another process.

The other process, called the response's process, runs the code of the response.
"""

from __future__ import annotations

import collections
import importlib
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from .answer_object import FIX, AnswerObject, NotPlainError
from .plain_data import MessageSocket, change, decode, encode

_ALIASES = {"np": "numpy", "pd": "pandas"}
_MODULE = "solution"
_MUTABLE = (list, dict, set, bytearray, collections.deque)
_UNSHARED = 3
"""Reference count of a copy that the test no longer holds."""
TEXT = "_text_"
"""Name of the attribute that holds the message of an exception raised by the response."""


class TestsError(Exception):
    """The tests can't run in another process than the response's code."""


class AnswerLostError(BaseException):
    """The process that runs the response's code has ended or sent an invalid reply, so that it can't answer the tests any more."""


def refusal(error: BaseException) -> dict[str, str]:
    """Return the reply to a request whose result can't be sent because of `error`."""
    why = (
        "it has a cycle or is nested too deeply"
        if isinstance(error, RecursionError)
        else str(error)
    )
    return {
        "refused": f"a value can't be sent between the tests' and the response's process: {why[:200]}; {FIX} if the response may "
        "influence the result"
    }


class AnswerClient:
    """Sends the tests' requests to the process that runs the response's code.

    Args:
        channel: the socket to the response's process.
    """

    def __init__(self, channel: MessageSocket) -> None:
        self._channel = channel
        self._exceptions: dict[tuple[str, str], type[BaseException]] = {}
        self._imported: list[object] = []
        self._globals: dict[str, object] = {}
        self._sent: dict[tuple[str, str], object] = {}
        self._copies: list[tuple[Any, Any, Any, Any]] = []
        self._given = False
        self.lost = False
        """Whether the response's process has ended or sent an invalid reply. The running test then fails, even if it caught AnswerLostError."""
        self.refused = ""
        """Why an operation on the response's values was refused; empty if none was. The running test then fails, even if it caught
        NotPlainError."""
        self.stops = False
        """Whether the running test mentions StopIteration."""
        self.fault = ""
        """Why the tests can't run in a separate process; empty if they can. There is then no score, even if a test caught TestsError."""

    def ask(self, what: str, /, *args: object, **named: object) -> Any:
        """Return the result of an operation that the response's process performs on its own objects and on plain data.

        Args:
            what: the operation, such as `call` or `getattr`.
            args: the operation's positional arguments, starting with the object on which it is performed.
            named: the operation's keyword arguments.

        Raises:
            TestsError: an argument is too long, or is not plain data.
            NotPlainError: a value of the response has a cycle, is nested too deeply, or is too long.
            AnswerLostError: no valid reply arrived.
            BaseException: the operation raised an exception, which is recreated with the same type name and arguments.
        """
        if what != "change":
            self._write_back()
        reply = self.exchange(
            {"do": what, "args": self._encoded(list(args)), "named": self._encoded(named)}
        )
        with self._reading():
            if "arguments" in reply:
                changed, changed_named = (self._decoded(part) for part in reply["arguments"])
                for ours, theirs in (
                    *zip(args, changed, strict=True),
                    *((named[key], changed_named[key]) for key in named),
                ):
                    if type(ours) is not AnswerObject:
                        change(ours, theirs)
            if what == "call":
                self._read_globals()
            if "raised" not in reply:
                value = self._decoded(reply["value"])
                if what == "getattr" and type(value) in _MUTABLE:
                    self._copies.append((*args, value, self._encoded(value)))
                return value
            error = self._error(reply)
        if what == "call" and isinstance(error, StopIteration) and not self.stops:
            self.refuse(
                "the response raised StopIteration, which would silently end a loop of the test"
            )
        raise error

    def _write_back(self) -> None:
        """Apply the test's changes of copied attributes, such as `node.children.append(…)`, to the response's objects."""
        copies, self._copies = self._copies, []
        for one in copies:
            owner, name, value, before = one
            now = self._encoded(value)
            if now != before:
                self.ask("change", owner, name, value)
            if sys.getrefcount(value) > _UNSHARED:
                self._copies.append((owner, name, value, now))

    def _encoded(self, value: object) -> Any:
        try:
            return encode(value, self._reference, exact=True)
        except RecursionError as deep:
            self.refuse(refusal(deep)["refused"])

    def refuse(self, why: str) -> NoReturn:
        """End the running test as failed.

        Raises:
            NotPlainError: always.
        """
        self.refused = self.refused or why
        raise NotPlainError(why)

    def _failing(self, why: str) -> TestsError:
        self.fault = self.fault or why
        return TestsError(why)

    def resolve(self, name: str, namespace: dict[str, Any]) -> None:
        """Add the object that has this name in the response's module, if any, to a namespace.

        A module or object that the response imported is imported in this process instead of being copied. A module under another name
        than its own or a usual alias (`np`, `pd`) is left out.
        """
        reply = self.exchange({"do": "name", "name": name})
        with self._reading():
            if "value" in reply:
                namespace[name] = self._decoded(reply["value"])
                if type(namespace[name]) is not AnswerObject:
                    self._namespace, self._globals[name] = namespace, namespace[name]
            elif "exception" in reply:
                namespace[name] = self._exception(reply["exception"])
            elif "attribute" in reply or reply.get("module") == _ALIASES.get(name, name):
                try:
                    module = importlib.import_module(reply["module"])
                    namespace[name] = getattr(module, name) if "attribute" in reply else module
                except (ImportError, AttributeError):
                    return
                given = [namespace[name]] if "attribute" in reply else vars(module).values()
                self._imported += given

    def import_module(self, name: str, namespace: dict[str, Any]) -> None:
        """Import a module that the tests use into a namespace, if it exists, even if the response defines an object with the same name."""
        try:
            namespace[name] = importlib.import_module(_ALIASES.get(name, name))
        except ImportError:
            return

    def _read_globals(self) -> None:
        """Refresh the copies of the response's globals that are plain data, except for names that the tests have assigned."""
        for name, value in list(self._globals.items()):
            if self._namespace.get(name) is value:
                self.resolve(name, self._namespace)

    def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the response's process and return the reply.

        Raises:
            TestsError: the request is too long.
            AnswerLostError: no valid reply arrived.
        """
        if self.lost:
            raise AnswerLostError
        with self._reading():
            try:
                self._channel.send(request)
            except ValueError as error:
                why = f"the tests pass the response an argument that is too long ({error}); {FIX}"
                if self._given:  # the response may have caused the length
                    self.refuse(why)
                raise self._failing(why) from error
            reply = self._channel.receive()
            if reply is None:
                raise AnswerLostError
            if "refused" in reply:
                self.refuse(str(reply["refused"]))
            self._given |= any(
                reply.get(part) is not None and reply[part][:1] != ["reference"]
                if isinstance(reply.get(part), list)
                else reply.get(part) is not None
                for part in ("value", "args", "arguments")
            )
            return reply

    def _reading(self) -> _Reading:
        return _Reading(self)

    def _decoded(self, data: Any) -> Any:
        return decode(data, self._kept)

    def _kept(self, key: int | str, name: str) -> object:
        """Return the object for a placeholder in a reply (see `plain_data.decode`).

        Args:
            key: the key of an object of the response, an integer; or the module of an object that the tests sent, a string.
            name: the name of the object's type, or the name of the sent object in its module.

        Raises:
            KeyError: the tests sent no such object.
        """
        if isinstance(key, str):
            return self._sent[key, name]
        return AnswerObject(self, int(key), str(name))

    def _error(self, reply: Mapping[str, Any]) -> BaseException:
        kind, args = self._exception(reply["raised"]), self._decoded(reply["args"])
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        # Skip the initializer of an imported class, since the reply contains the exception's attributes.
        error = kind.__new__(kind, *args)
        builtin.__init__(error, *args)  # type: ignore[misc]
        vars(error).update(self._decoded(reply["attributes"]))
        return error

    def _exception(self, lineage: list[Any]) -> type[BaseException]:
        """Return the exception class: built-in, imported in this process, or a new class with the same name and bases.

        Args:
            lineage: `[module, name, *lineages of the bases]` of the class in the response's process.
        """
        home, name, *above = lineage
        if not home.startswith((_MODULE, __package__)):
            try:
                kind = getattr(importlib.import_module(home), name)
            except (ImportError, AttributeError, ValueError):
                kind = None
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
        if (home, name) not in self._exceptions:
            bases = tuple(map(self._exception, above))
            namespace = {"__module__": home, "__str__": lambda error: str(vars(error).get(TEXT))}
            self._exceptions[home, name] = type(name, bases, namespace)
        return self._exceptions[home, name]

    def _reference(self, value: object) -> list[Any]:
        if type(value) is AnswerObject:
            return ["reference", *object.__getattribute__(value, "_key")]
        home, name = str(getattr(value, "__module__", "")), getattr(value, "__name__", "")
        own = home.startswith((_MODULE, __package__))
        if not own and callable(value) and getattr(sys.modules.get(home), name, None) is value:
            self._sent[home, name] = value
            return ["import", home, name]
        why = f"the tests pass the response a value of type {type(value).__name__}, which can't be sent to its process; {FIX}"
        if isinstance(value, BaseException) or any(
            one is value or one is type(value) for one in self._imported
        ):
            self.refuse(why)
        raise self._failing(why)


class _Reading:
    """Context manager for reading a reply.

    TestsError and NotPlainError pass. RecursionError becomes NotPlainError, since a value is nested too deeply. Any other error shows that the
    reply is malformed: the response's process then counts as lost, and AnswerLostError is raised.
    """

    def __init__(self, client: AnswerClient) -> None:
        self._client = client

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RecursionError):
            self._client.refuse(refusal(error)["refused"])
        if error is not None and not isinstance(error, (TestsError, NotPlainError)):
            self._client.lost = True
            raise AnswerLostError from error
