"""Code scored by test cases: passing and failing programs, and failures without a score."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.interfaces import FailureKind, PluginContext
from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code import Code
from dovetail_rewards.functions.code_sandboxes import runner_for
from dovetail_rewards.sandbox import SandboxError, SandboxUnreachableError, available_levels
from dovetail_rollouts import RewardCall, failure_from
from dovetail_sdk.testing.fake_server import FakeServer, reply

pytestmark = pytest.mark.skipif(
    not any(level.available for level in available_levels()[:2]),
    reason=f"no sandbox here: {'; '.join(f'{r.level}: {r.detail}' for r in available_levels())}",
)

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}


def fenced(source: str) -> str:
    return f"So here it is:\n```python\n{source}\n```\nThat is all."


def judged(response: str, truth: Any, **config: Any) -> dict[str, Any]:
    options = {"time_limit": 1.0, **config}
    return dict(Code(CodeConfig(**options), PluginContext()).compute_score(None, response, truth))


def score(source: str, truth: Any, **config: Any) -> float:
    return float(judged(fenced(source), truth, **config)["score"])


def test_a_program_that_reads_and_prints_passes_all_tests() -> None:
    found = judged(fenced("print(sum(map(int, input().split())))"), SUMS)
    assert found == {"score": 1.0, "passed_share": 1.0}


def test_the_first_failing_test_is_named_with_what_it_gave() -> None:
    found = judged(fenced("print(3)"), SUMS, scoring="share")
    assert found["score"] == found["passed_share"] == pytest.approx(1 / 3)
    assert found["first_failure"] == "test 2 of 3: gave '3', expected '7'"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 / 0", "failed, exit status 1: ZeroDivisionError:"),
        ("print(", "SyntaxError"),
        ("while True: pass", "timeout"),
        ("import os; os.abort()", "crashed by signal 6"),
        ("x = bytearray(10**11)", "memory"),
        ("while True: print('x' * 10**5)", "output_limit"),
        ("import time; time.sleep(60)", "timeout"),
    ],
)
def test_a_program_that_fails_scores_and_says_how(source, why) -> None:
    found = judged(fenced(source), SUMS, time_limit=0.3)
    assert found["score"] == 0.0
    assert why in found["first_failure"]


@pytest.mark.parametrize(
    "truth",
    [
        SUMS,
        json.dumps(SUMS),
        [{"input": "1 2", "output": "3", "type": "stdin_stdout"}],
        {"inputs": [["1 2"]], "outputs": [["3"]]},
        {"inputs": ["1 2"], "outputs": [3]},
    ],
)
def test_every_form_of_standard_input_and_output_is_read(truth) -> None:
    assert Code.check_row(CodeConfig(), truth) is None
    assert score("print(sum(map(int, input().split())))", truth) == 1.0
    assert score("print(4)", truth) == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        ADD,
        json.dumps(ADD),
        {**ADD, "outputs": [3, 7]},
        {**ADD, "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]},
        {**ADD, "fn_name": "Solution.add"},
        [{"input": "1\n2", "output": "3", "fn_name": "add"}],
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a: int, b: Optional[int]) -> int:\n        return a + b",
    ],
)
def test_every_form_of_a_function_call_is_read(source, truth) -> None:
    assert score(source, truth) == 1.0
    assert score(source.replace("a + b", "a - b"), truth) == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        {"tests": "assert add(1, 2) == 3\nassert add(3, 4) == 7"},
        {"tests": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]},
        {"test_list": ["assert add(one, 2) == 3"], "test_setup_code": "one = 1"},
        {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
        "x = 1\nassert add(x, 2) == 3",
        ["assert add(1, 2) == 3"],
    ],
)
def test_every_form_of_assertions_is_read(truth) -> None:
    assert Code.check_row(CodeConfig(), truth) is None
    assert score("def add(a, b):\n    return a + b", truth) == 1.0
    found = judged(fenced("def add(a, b):\n    return a * b + 2"), truth)
    assert found["score"] == 0.0
    assert "AssertionError" in found["first_failure"]


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c", "\x1d"])
def test_lines_of_tests_and_of_arguments_end_at_line_ends_alone(mark) -> None:
    tests = f"x = 'a{mark}b'\nassert f(x) == x\nassert f('c') == 'c'\nassert f(1) == 2"
    found = judged(fenced("def f(x):\n    return x"), {"tests": tests}, scoring="share")
    assert found["passed_share"] == pytest.approx(2 / 3)
    line = json.dumps(f"a{mark}b", ensure_ascii=False)
    calls = {"inputs": [f"{line}\r\n2"], "outputs": [line], "fn_name": "f"}
    assert score("def f(x, y):\n    return x if y == 2 else None", calls) == 1.0


def test_each_assertion_is_a_test() -> None:
    truth = {"tests": "x = 1\nassert f(x) == 1\n\nassert f(2) == 2\nassert f(3) == 9"}
    found = judged(fenced("def f(x):\n    return x"), truth, scoring="share")
    assert found["passed_share"] == pytest.approx(2 / 3)
    assert found["first_failure"].startswith("test 3 of 3")


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import atexit; raise KeyboardInterrupt",
        'import os\nos.write(1, b\'{"case": 0, "value": 3}\\n\' * 3)\nos._exit(0)',
        'import os\nfor fd in range(10):\n    try: os.write(fd, b\'{"case": 0, "held": ""}\\n\')\n    except OSError: pass',
        "import builtins, sys\nsys.modules['json'] = None",
    ],
)
@pytest.mark.parametrize("truth", [ADD, {"tests": "assert add(1, 2) == 3"}])
def test_leaving_early_or_writing_to_the_channel_passes_nothing(source, truth) -> None:
    assert score(source, truth) == 0.0


def test_what_a_test_expects_is_not_inside() -> None:
    spy = """
import gc, sys
def add(a, b):
    seen = [repr(one) for one in gc.get_objects() if isinstance(one, (dict, list, tuple, str))]
    frame, names = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals)); frame = frame.f_back
    return any(''.join(['98765432', '1']) in text for text in seen)
"""
    truth = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [987654321]}
    assert "gave 'False'" in judged(fenced(spy), truth)["first_failure"]


def test_an_object_that_equals_everything_does_not_pass() -> None:
    source = "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Any(99)"
    assert score(source, ADD) == 0.0


def test_one_call_that_ends_the_process_costs_that_test_alone() -> None:
    source = """
import os, time
def f(x):
    if x == 1: os._exit(0)
    if x == 2: raise ValueError('two')
    if x == 3:
        while True: pass
    if x == 4: return {1: object()}
    if x == 5:
        deep = []
        for _ in range(100000): deep = [deep]
        return deep
    return x
"""
    truth = {"fn_name": "f", "inputs": [[n] for n in range(8)], "outputs": [[n] for n in range(8)]}
    found = judged(fenced(source), truth, scoring="share", time_limit=0.3)
    assert found["passed_share"] == pytest.approx(3 / 8)
    assert found["first_failure"].startswith("test 2 of 8: ")


@pytest.mark.parametrize(
    "spend",
    [
        "while time.process_time() < end: pass",
        pytest.param("time.sleep(20)", marks=pytest.mark.nightly),
    ],
)
def test_a_response_has_one_budget_for_all_of_its_tests(spend) -> None:
    """Each process reports only its first case, and then uses the time of all cases."""
    source = f"""
import os, sys, time
frame = sys._getframe()
while 'task' not in frame.f_locals:
    frame = frame.f_back
case = len(frame.f_locals['task']['cases']) - 1
end = time.process_time() + 0.25 * (case + 1)
{spend}
os.write(3, b'{{"case": %d, "value": 0}}\\n' % case)
os._exit(0)
"""
    truth = {"fn_name": "f", "inputs": [[n] for n in range(8)], "outputs": [-1] * 8}
    began = time.monotonic()
    found = judged(
        fenced(source),
        truth,
        scoring="share",
        time_limit=0.3,
        max_timeouts=8,
    )
    assert found["score"] == 0.0
    assert time.monotonic() - began < 40


def test_a_weaker_level_is_warned_of_at_each_start() -> None:
    logger = Mock()
    Code(CodeConfig(level="subprocess"), PluginContext(logger=logger))
    assert "level=subprocess" in logger.warning.call_args.args[0]
    Code(CodeConfig(), PluginContext(logger=logger))
    assert logger.warning.call_count == 1


def test_after_too_many_timeouts_the_rest_does_not_pass() -> None:
    truth = {"inputs": ["1"] * 6, "outputs": ["1"] * 6}
    found = judged(fenced("while True: pass"), truth, scoring="share", time_limit=0.2)
    assert found["passed_share"] == 0.0
    assert "timeout" in found["first_failure"]


def test_printing_inside_a_called_function_does_no_harm() -> None:
    assert (
        score("print('hello')\ndef add(a, b):\n    print('x' * 1000)\n    return a + b", ADD) == 1.0
    )


def test_the_last_code_block_counts() -> None:
    wrong, right = fenced("print(1)"), fenced("print(sum(map(int, input().split())))")
    assert judged(wrong + right, SUMS)["score"] == 1.0
    assert judged(right + wrong, SUMS)["score"] == 0.0
    tilde = "~~~\nprint(sum(map(int, input().split())))\n~~~"
    assert judged(tilde, SUMS)["score"] == 1.0


@pytest.mark.parametrize("response", ["", "no code", "```python\n```", "```python\nprint(1)"])
def test_a_response_without_code_has_a_score_of_its_own(response) -> None:
    found = judged(response, SUMS, no_code_score=-1.0)
    assert (found["score"], found["first_failure"]) == (-1.0, "no code block")


def test_the_whole_response_may_be_the_program() -> None:
    assert judged("print(sum(map(int, input().split())))", SUMS, extract="whole")["score"] == 1.0


def test_a_bound_of_tests_leaves_out_those_beyond() -> None:
    assert score("print(3)", SUMS, max_tests=1) == 1.0


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "NoneType"),
        ("not json", "neither JSON"),
        ("[1]", "invalid entry"),
        ({}, "expected two lists"),
        ({"inputs": ["1"], "outputs": []}, "1 `inputs` and 0 `outputs`"),
        ({"inputs": [], "outputs": []}, "no test cases"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "'a b'"),
        ({"inputs": ["\ud800"], "outputs": ["1"]}, "surrogates"),
        (json.dumps([{"input": ["1"], "output": ["\udfff"]}]), "surrogates"),
        ({"tests": "assert ("}, "not valid Python"),
        ({"tests": []}, "no tests"),
        ({"tests": [1]}, "[1]; expected a text"),
    ],
)
def test_a_ground_truth_without_tests_is_found_before_training(truth, why) -> None:
    assert why in (Code.check_row(CodeConfig(), truth) or "")


def test_threads_score_side_by_side() -> None:
    def one(number: int) -> float:
        truth = {"inputs": [f"{number}\n"], "outputs": [f"{number + 1}\n"]}
        return score("print(int(input()) + 1)", truth)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [1.0] * 40


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[int, Any]], list[dict[str, Any]]]]:
    """A sandbox service with SandboxFusion's interface: its address, the answers to give in turn, and the received requests."""
    answers: list[tuple[int, Any]] = []
    asked: list[dict[str, Any]] = []

    def run_code(request: Any) -> None:
        asked.append(json.loads(request.body))
        status, answer = answers[min(len(asked), len(answers)) - 1]
        reply(request, status, json.dumps(answer).encode())

    with FakeServer() as server:
        server.answers["/run_code"] = run_code
        yield server.url, answers, asked


def ran(
    status: str = "Finished", code: int | None = 0, stdout: str = "", stderr: str = ""
) -> dict[str, Any]:
    run = {
        "status": status,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
        "execution_time": 0.1,
    }
    return {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run}


def test_a_service_runs_programs_in_place_of_this_machine(service) -> None:
    url, answers, asked = service
    answers += [(200, ran(stdout="3\n")), (200, ran(stdout="8\n"))]
    found = judged(
        fenced("print(sum(map(int, input().split())))"),
        SUMS,
        service=url,
        scoring="share",
        max_tests=2,
    )
    assert found["passed_share"] == 0.5
    assert asked[0]["language"] == "python"
    assert asked[1]["stdin"] == "3 4\n"
    assert asked[0]["run_timeout"] == 5.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ran(code=1, stderr="Traceback\nValueError: no"), "failed, exit status 1: ValueError: no"),
        (ran(code=1, stderr="MemoryError"), "memory"),
        (ran(code=-11), "crashed by signal 11"),
        (ran("TimeLimitExceeded", None), "timeout"),
        (ran(stdout="x" * 2000), "output_limit"),
    ],
)
def test_a_program_that_fails_on_the_service_does_not_pass(service, answer, why) -> None:
    url, answers, _ = service
    answers.append((200, answer))
    found = judged(fenced("pass"), SUMS, service=url, output_kb=1)
    assert found["score"] == 0.0
    assert why in found["first_failure"]


@pytest.mark.parametrize(
    ("status", "answer", "kind", "retryable"),
    [
        (200, {"status": "SandboxError", "message": "full"}, FailureKind.UNREACHABLE, True),
        (200, ran("Error", None), FailureKind.UNREACHABLE, True),
        (503, {}, FailureKind.UNREACHABLE, True),
        (429, {}, FailureKind.UNREACHABLE, True),
        (400, {"detail": "no such language"}, FailureKind.EXCEPTION, False),
        (200, {"hello": 1}, FailureKind.EXCEPTION, False),
        (200, [1], FailureKind.EXCEPTION, False),
    ],
)
def test_a_fault_of_the_service_is_a_failure_and_no_score(
    service, status, answer, kind, retryable
) -> None:
    url, answers, _ = service
    answers.append((status, answer))
    with pytest.raises(SandboxError) as raised:
        judged(fenced("print(3)"), SUMS, service=url)
    failure = failure_from(raised.value, RewardCall(lambda: 0.0, "code"))
    assert (failure.kind, failure.retryable) == (kind, retryable)


def test_a_service_that_is_not_there_may_be_tried_again() -> None:
    with pytest.raises(SandboxUnreachableError, match="gave no answer") as raised:
        judged(fenced("print(3)"), SUMS, service="http://127.0.0.1:9")
    failure = failure_from(raised.value, RewardCall(lambda: 0.0, "code"))
    assert (failure.kind, failure.retryable) == (FailureKind.UNREACHABLE, True)


def test_an_address_that_is_none_is_an_error_before_training() -> None:
    with pytest.raises(SandboxError, match="'sandbox:8080'"):
        Code.check_row(CodeConfig(service="sandbox:8080"), SUMS)


def test_a_sandbox_that_cannot_be_set_up_gives_no_score() -> None:
    with pytest.raises(SandboxError, match="/nowhere/python"):
        judged(fenced("print(3)"), SUMS, python="/nowhere/python")


def test_functions_with_the_same_options_share_a_sandbox() -> None:
    assert runner_for(CodeConfig()) is runner_for(CodeConfig(scoring="share"))
    assert runner_for(CodeConfig()) is not runner_for(CodeConfig(preload=("array",)))
