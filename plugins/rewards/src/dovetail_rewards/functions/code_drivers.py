"""Programs that call a response's code inside the sandbox and report the result of each case.

Expected return values stay outside the sandbox, and reports are checked outside too. A response that writes to the drivers' channel
only produces an unreadable line. Assertions run in a separate sandbox (`sandbox.helper.evaluation`). If they run in the response's
process instead, a token marks each assertion that held; code that searches the memory of its process can find the token.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

import attrs

from dovetail_rewards.functions.code_questions import modules_used, names_used
from dovetail_rewards.sandbox import Program

_CLOCK_FACTOR = 10

_COMMON = """
import json, os, signal, sys, types
def drive():
    told = os.dup(1)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull)
    task = json.load(open(0, encoding="utf-8"))
    module = types.ModuleType("solution")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["solution"] = module
    exec(task["prelude"], module.__dict__)
    exec(compile(task["source"], "solution.py", "exec"), module.__dict__)
    def limited(number):
        for name in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(name, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])
        signal.setitimer(signal.ITIMER_REAL, task["seconds"] * task["clock"])
    def tell(number, **what):
        what["case"] = number
        data = (json.dumps(what, default=plain) + "\\n").encode()
        while data:
            data = data[os.write(told, data):]
    def plain(value):
        return value.tolist() if hasattr(value, "tolist") else list(value)
    def said(error):
        return f"{type(error).__name__}: {error}"[:300]
"""

_CALLS = """
    function = getattr(module, task["function"], None)
    if function is None:
        function = getattr(module.Solution(), task["function"])
    for number, arguments in enumerate(task["cases"]):
        limited(number)
        try:
            tell(number, value=function(*arguments))
        except BaseException as error:
            tell(number, error=said(error))
drive()
"""

_ASSERTS = """
    for number, test in enumerate(task["cases"]):
        limited(number)
        try:
            exec(compile(test, "test.py", "exec"), module.__dict__)
        except BaseException as error:
            tell(number, error=said(error))
        else:
            tell(number, held=task["token"])
drive()
"""

_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
from math import ceil, floor, gcd, inf, sqrt
"""
"""Imports that run before a response's code: programming sites provide them, and solutions in the style of these sites rely on them."""


@attrs.frozen(kw_only=True)
class Told:
    """The report on one test case by the program that runs the tests (the driver)."""

    value: Any = None
    """The call's result, as a JSON value."""
    returned: bool = False
    """Whether the call returned, or the assertion held."""
    error: str = ""
    """The exception, if the call raised or the assertion failed."""
    fault: str = ""
    """The reason why these tests can't run outside the response's process, whichever response is tested; empty if they can."""


@attrs.frozen(kw_only=True)
class Driver:
    """A program that runs test cases, with the method that reads its report."""

    program: Program
    """The program to run."""
    answer: Program | None = None
    """The program with the response's code, if the tests run in a separate process; else None."""
    token: str = ""
    """The secret text that the driver reports for each assertion that held; empty if the test cases are calls."""

    def read(self, stdout: bytes) -> dict[int, Told]:
        """Return the report on each test case by its index, from the driver's output; cases that did not run are absent."""
        found: dict[int, Told] = {}
        for line in stdout.splitlines():
            try:
                what = json.loads(line)
                case = what["case"]
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            if isinstance(case, int) and case not in found:
                found[case] = self._told(what)
        return found

    def _told(self, what: dict[str, Any]) -> Told:
        if "error" in what:
            return Told(error=str(what["error"]))
        if "fault" in what:
            return Told(fault=str(what["fault"]))
        if self.token:
            held = what.get("held") == self.token
            return Told(returned=held, error="" if held else "a forged report")
        return Told(value=what.get("value"), returned="value" in what)


def call_driver(source: str, function: str, cases: Iterable[list[Any]], seconds: float) -> Driver:
    """Return a driver: a program that calls `function`, or the `Solution` method with that name, once for each list of arguments.

    Args:
        source: the response's code.
        function: the function's name.
        cases: the arguments of each call, JSON values.
        seconds: the CPU seconds allowed for each call.
    """
    task = {"function": function, "cases": list(cases), "prelude": _PRELUDE}
    return Driver(program=_program(_COMMON + _CALLS, source, seconds, task))


def assert_driver(
    source: str, setup: str, tests: Iterable[str], seconds: float, *, in_process: bool
) -> Driver:
    """Return a driver: a program that runs `setup` and then each test.

    Args:
        source: the response's code.
        setup: statements to run before the tests.
        tests: the text of each test.
        seconds: the CPU seconds allowed for each test.
        in_process: whether the tests run in the response's process; otherwise in a separate process, which calls the response's.
    """
    tests, token = list(tests), secrets.token_hex(16)
    task = {"cases": tests, "token": token, "prelude": setup}
    if in_process:
        return Driver(program=_program(_COMMON + _ASSERTS, source, seconds, task), token=token)
    limits = {"seconds": seconds, "clock": _CLOCK_FACTOR}
    texts = [setup, *tests]
    names = {"names": names_used(texts), "modules": modules_used(texts)}
    return Driver(
        program=_channel_end("run_tests", {**task, **names, **limits}),
        answer=_channel_end("run_answer", {"prelude": setup, "source": source, **limits}),
        token=token,
    )


def _program(driver: str, source: str, seconds: float, task: dict[str, Any]) -> Program:
    told = {**task, "source": source, "seconds": seconds, "clock": _CLOCK_FACTOR}
    return Program(source=driver, stdin=json.dumps(told).encode())


def _channel_end(function: str, task: dict[str, Any]) -> Program:
    source = f"import json\nfrom helper.evaluation import {function}\n{function}(json.loads({json.dumps(task)!r}))\n"
    return Program(source=source)
