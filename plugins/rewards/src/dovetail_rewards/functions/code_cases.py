"""Runs a program against test cases in a sandbox."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code_compare import same_output, same_value
from dovetail_rewards.functions.code_drivers import Driver, Told, assert_driver, call_driver
from dovetail_rewards.functions.code_sandboxes import limits_of
from dovetail_rewards.functions.code_truth import (
    AssertTests,
    CallTests,
    StdinTests,
    Tests,
    value_of,
)
from dovetail_rewards.sandbox import Program, ProgramLimits, ProgramVerdict, Result, Runner

_SHOWN = 200
_LEAST_S = 0.05
"""Minimum time limit of a process, in seconds, for a response that has used up its time; it is too short to pass a test."""
_CALL_OUTPUT = 8 << 20
"""Minimum limit, in bytes, of a test process's output, which contains the values that the tested calls return."""


@attrs.frozen(kw_only=True)
class Case:
    """One test case and its result."""

    passed: bool
    """Whether the program passed the test case."""
    why: str = ""
    """The reason for a failure; empty if the case passed."""
    stderr: str = ""
    """The end of the program's standard error."""
    timeout: bool = False
    """Whether the program ran out of time."""


class CaseRunner:
    """Runs the test cases of one row in order, up to the limits of the config.

    Args:
        config: the limits, and the conditions under which to stop.
        runner: the sandbox.
    """

    def __init__(self, config: CodeConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._limits = limits_of(config)

    def run(self, source: str, tests: Tests) -> list[Case]:
        """Run a program on test cases in order, and return the results.

        Testing stops at the first failure with `scoring: all`, and after `max_timeouts` cases that timed out.

        Raises:
            SandboxError: the sandbox could not be started.
        """
        if isinstance(tests, StdinTests):
            cases = self._stdin_cases(source, tests)
        else:
            cases = self._driven_cases(source, tests)
        done: list[Case] = []
        timeouts = 0
        for case in cases:
            done.append(case)
            timeouts += case.timeout
            if not case.passed and self._config.scoring == "all":
                break
            if timeouts >= self._config.max_timeouts:
                break
        return done

    def _stdin_cases(self, source: str, tests: StdinTests) -> Iterator[Case]:
        pairs = zip(tests.inputs, tests.outputs, strict=True)

        def one(pair: tuple[str, str]) -> Case:
            text, expected = pair
            result = self._runner.run(Program(source=source, stdin=text.encode()), self._limits)
            if result.verdict is not ProgramVerdict.OK:
                return _ended(result)
            printed = result.stdout.decode("utf-8", "replace")
            if same_output(printed, expected, self._config.tolerance):
                return Case(passed=True)
            return Case(passed=False, why=_wrong(printed, expected), stderr=_tail(result))

        yield from map(one, pairs)

    def _driven_cases(self, source: str, tests: CallTests | AssertTests) -> Iterator[Case]:
        """Yield the results of all cases, run in one process. If a case ends the process, another process runs the cases after it.

        If a process ends without any result, its cases fail, since the response's code itself fails.
        """
        texts: Sequence[Any] = tests.inputs if isinstance(tests, CallTests) else tests.tests
        begin = 0
        # Limit of all processes of a response together: twice the time of its tests, since each process loads the code again.
        left = ProgramLimits(cpu_s=2 * self._config.time_limit * (len(texts) + 1))
        while begin < len(texts):
            driver = self._driver(source, tests, begin)
            count = len(texts) - begin
            cpu_s = self._config.time_limit * (count + 1)
            limits = attrs.evolve(
                self._limits,
                cpu_s=min(cpu_s, left.cpu_s),
                wall_s=min(ProgramLimits(cpu_s=cpu_s).wall, left.wall),
                output=max(self._limits.output, _CALL_OUTPUT),
            )
            result = self._result(driver, limits)
            left = attrs.evolve(
                left,
                cpu_s=max(left.cpu_s - result.cpu_s, _LEAST_S),
                wall_s=max(left.wall - result.wall_s, _LEAST_S),
            )
            told = driver.read(result.stdout)
            for number in range(count):
                begin += 1
                if number not in told:
                    yield _ended(result)
                    # Without any result, the code itself fails, and would fail in every further process.
                    if not told:
                        yield from (_ended(result) for _ in range(count - 1))
                        return
                    break
                if told[number].fault:
                    raise ValueError(f"test {begin} can't be run: {told[number].fault}")
                yield self._judged(tests, begin - 1, told[number], result)

    def _result(self, driver: Driver, limits: ProgramLimits) -> Result:
        """Run a driver, and return its result.

        If the tests run in a separate process, the result is that of the response's process if this process failed, else that of the
        tests' process. The output is always that of the tests' process, and the CPU time that of both.
        """
        if driver.answer is None:
            return self._runner.run(driver.program, limits)
        with ThreadPoolExecutor(1) as thread:
            ours, theirs = socket.socketpair()
            answering = thread.submit(self._run_on, theirs, driver.answer, limits)
            tests = self._run_on(ours, driver.program, limits)
            answer = answering.result()
        return attrs.evolve(
            tests if answer.ok else answer,
            stdout=tests.stdout,
            cpu_s=answer.cpu_s + tests.cpu_s,
        )

    def _run_on(self, channel: socket.socket, program: Program, limits: ProgramLimits) -> Result:
        with channel:
            return self._runner.run(attrs.evolve(program, channel=channel), limits)

    def _driver(self, source: str, tests: CallTests | AssertTests, begin: int) -> Driver:
        seconds = self._config.time_limit
        if isinstance(tests, CallTests):
            return call_driver(source, tests.function, tests.inputs[begin:], seconds)
        in_process = self._config.tests == "in_process"
        return assert_driver(
            source, tests.setup, tests.tests[begin:], seconds, in_process=in_process
        )

    def _judged(
        self, tests: CallTests | AssertTests, number: int, told: Told, result: Result
    ) -> Case:
        if not told.returned:
            return Case(passed=False, why=told.error, stderr=_tail(result))
        if isinstance(tests, AssertTests):
            return Case(passed=True)
        expected = tests.outputs[number]
        if any(same_value(told.value, one, self._config.tolerance) for one in _accepted(expected)):
            return Case(passed=True)
        return Case(passed=False, why=_wrong(repr(told.value), repr(expected)))


def _accepted(expected: object) -> Iterator[Any]:
    """Yield the values that count as an expected value: the value, its JSON content if it is a text, and the element of a list of one."""
    for one in (expected, value_of(expected) if isinstance(expected, str) else expected):
        yield one
        if isinstance(one, (list, tuple)) and len(one) == 1:
            yield one[0]


def _ended(result: Result) -> Case:
    """Return the failed case for a program that ended before it reported the case's result."""
    why = str(result.verdict)
    if result.verdict is ProgramVerdict.OK:
        why = "the program exited before the test was finished"
    elif result.verdict is ProgramVerdict.TIMEOUT:
        why = f"timeout after {result.cpu_s:.1f} s of CPU time and {result.wall_s:.1f} s of wall-clock time"
    elif result.signal is not None:
        why = f"crashed by signal {result.signal}"
    elif result.exit_status:
        last = _tail(result).rstrip().rpartition("\n")[2]
        why = f"{result.verdict}, exit status {result.exit_status}: {last}"
    timeout = result.verdict is ProgramVerdict.TIMEOUT
    return Case(passed=False, why=why, stderr=_tail(result), timeout=timeout)


def _wrong(given: str, expected: str) -> str:
    return f"gave {_cut(given)!r}, expected {_cut(expected)!r}"


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _tail(result: Result) -> str:
    return result.stderr[-2000:].decode("utf-8", "replace")
