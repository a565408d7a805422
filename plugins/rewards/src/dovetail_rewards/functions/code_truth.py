"""Parses ground truths of code: test cases in the formats of common datasets."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.interfaces import GroundTruth


@attrs.frozen
class StdinTests:
    """Tests that give a program an input and compare its output with the expected output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@attrs.frozen
class CallTests:
    """Tests that call a function, or a method of the class `Solution`, and compare its results with the expected outputs."""

    function: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@attrs.frozen
class AssertTests:
    """Tests of one or more assertions each; the statements in `setup` run before the tests."""

    setup: str
    tests: tuple[str, ...]


Tests = StdinTests | CallTests | AssertTests


def parse_truth(ground_truth: GroundTruth) -> Tests:
    """Return the test cases of a row.

    Args:
        ground_truth: a mapping or its JSON. Keys: `inputs`, `outputs` and perhaps `fn_name`; `tests` (text, or a list of texts);
            `test_list` and `test_setup_code`; or `test` and `entry_point`. Also a list of `{"input": …, "output": …}`, a list of
            tests as texts, or a text of tests.

    Raises:
        ValueError: the ground truth has none of these forms; the message names the missing part.
    """
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            if "assert" not in truth:
                raise ValueError(
                    f"the ground truth is neither JSON ({error}) nor Python tests with an `assert`"
                ) from error
            truth = {"tests": truth}
    if isinstance(truth, (list, tuple)):
        truth = _from_list(truth)
    if not isinstance(truth, Mapping):
        raise ValueError(  # noqa: TRY004 - one error for every bad row
            f"the ground truth is of type {type(truth).__name__}; expected a mapping, or its JSON"
        )
    if any(key in truth for key in ("tests", "test_list", "test")):
        return _assert_tests(truth)
    return _case_tests(truth)


def _from_list(cases: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return `inputs` and `outputs` from a list of cases, or `tests` from a list of texts."""
    if cases and all(isinstance(case, str) for case in cases):
        return {"tests": list(cases)}
    if not all(isinstance(case, Mapping) and {"input", "output"} <= set(case) for case in cases):
        raise ValueError(
            "the ground truth is a list with an invalid entry; expected only texts of Python tests, or only mappings with `input` and `output`"
        )
    names = {case["fn_name"] for case in cases if case.get("fn_name")}
    if len(names) > 1:
        raise ValueError(
            f"the ground truth's test cases name several functions: {', '.join(sorted(map(str, names)))}; "
            "expected the same `fn_name` in all"
        )
    found: dict[str, Any] = {
        key: [case[key[:-1]] for case in cases] for key in ("inputs", "outputs")
    }
    return {**found, "fn_name": names.pop()} if names else found


def _case_tests(truth: Mapping[Any, Any]) -> Tests:
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        raise ValueError(  # noqa: TRY004
            f"the ground truth has `inputs` {inputs!r:.60} and `outputs` {outputs!r:.60}; expected two lists"
        )
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the ground truth has {len(inputs)} `inputs` and {len(outputs)} `outputs`; expected equal numbers"
        )
    if not inputs:
        raise ValueError("the ground truth has no test cases: `inputs` and `outputs` are empty")
    function = truth.get("fn_name")
    if not function:
        return StdinTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not isinstance(function, str) or not all(
        part.isidentifier() for part in function.split(".")
    ):
        raise ValueError(
            f"`fn_name` {function!r:.60} of the ground truth is not a function's name; expected one such as 'solve' or 'Solution.solve'"
        )
    return CallTests(
        function.rpartition(".")[2],
        tuple(map(_arguments, inputs)),
        tuple(outputs),
    )


def _assert_tests(truth: Mapping[Any, Any]) -> AssertTests:
    tests = next(truth[key] for key in ("tests", "test_list", "test") if key in truth)
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"the ground truth's tests are {tests!r:.60}; expected a text or a list of texts"
        )
    if truth.get("entry_point"):
        texts = [f"{texts[0]}\n\ncheck({truth['entry_point']})\n"]
    elif len(texts) == 1:
        texts = _split(texts[0])
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError("the ground truth has no tests: every test in it is an empty text")
    setup = str(truth.get("test_setup_code") or "")
    for text in (setup, *texts):
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(
                f"test {text!r:.60} of the ground truth is not valid Python: {error}"
            ) from error
    return AssertTests(setup, tuple(texts))


def _split(text: str) -> list[str]:
    """Split the text of tests into one test per top-level assertion, each with the statements between the previous assertion and it."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"the ground truth's tests are not valid Python: {error}") from error
    # Split lines as Python's parser does: `str.splitlines` would also split at form feeds and U+2028.
    tests, lines, begin = [], [*io.StringIO(text, newline="")], 0
    for statement in statements:
        if isinstance(statement, ast.Assert):
            end = statement.end_lineno or statement.lineno
            if end > begin:
                tests.append("".join(lines[begin:end]))
                begin = end
    rest = "".join(lines[begin:])
    if tests and rest.strip():
        tests[-1] += rest
    return tests or [text]


def _text(value: object) -> str:
    """Return an input or output as text: a text unchanged, a list as lines, any other value as JSON."""
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_text, value))
    text = value if isinstance(value, str) else json.dumps(value)
    text.encode()  # raises ValueError for lone surrogates, which programs can't read or print
    return text


def _arguments(value: object) -> list[Any]:
    """Return the arguments of a call. A list holds the arguments, a text one JSON value per line; any other value is the only argument."""
    if isinstance(value, str):
        return [value_of(line.removesuffix("\r")) for line in value.split("\n") if line.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def value_of(text: str) -> Any:
    """Return the JSON value of a text; if the text is not JSON, return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
