"""Mathematical answers: extraction, equality, and failures of the comparison, which never count as 0."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse

from dovetail.errors import PluginNeedsError, RewardError
from dovetail.interfaces import FailureKind, PluginContext, Score
from dovetail_rewards.config import DapoMathConfig, MathConfig
from dovetail_rewards.functions import math_processes, math_worker
from dovetail_rewards.functions.dapo_math import DapoMath
from dovetail_rewards.functions.math_answer import MathAnswer
from dovetail_rewards.functions.math_processes import MathProcesses, MathTimeoutError
from dovetail_rollouts import Scorer

HANGS = "9^{9^{9^{9}}}"
"""An answer on which sympy never ends."""


def math(text: str, truth: Any, **config: Any) -> dict[str, Any]:
    function = MathAnswer(MathConfig(processes=1, **config), PluginContext())
    return dict(function.compute_score("lighteval/MATH", text, truth))


def dapo(text: str, truth: Any, **config: Any) -> dict[str, Any]:
    function = DapoMath(DapoMathConfig(**config), PluginContext())
    return dict(function.compute_score("math_dapo", text, truth))


@pytest.mark.parametrize("truth", ["0.5", 0.5, ["7", r"\frac{1}{2}"], r"\boxed{\frac12}"])
def test_a_ground_truth_is_a_text_a_number_or_a_list(truth) -> None:
    parts = math(r"so it is \boxed{\dfrac12}.", truth)
    assert parts == {"score": 1.0, "format": 1.0, "correct": 1.0, "pred": r"\dfrac12"}


@pytest.mark.parametrize("answer", ["", "5, 6", r"\frac{", r"\left(" * 50, "9" * 5000, "1" * 990])
def test_another_answer_earns_the_form_alone(answer) -> None:
    parts = math(f"so it is \\boxed{{{answer}}}", "7", format_score=-0.5)
    assert parts["correct"] == 0.0
    assert parts["score"] == -0.5 * parts["format"]


@pytest.mark.parametrize(
    ("text", "pred"),
    [
        (r"\boxed{3} or rather \boxed{4}", "4"),
        (r"\boxed{3} or \boxed{4", "3"),
        (r"\boxed{\frac{a}{b}}", r"\frac{a}{b}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{x}", "x"),
        (r"\boxed{a = \boxed{7}}", "7"),
        ("The final answer is: $4$.", "$4$"),
        ("**Answer:** 4", "4"),
        ("Answer：4", "4"),
        ("The answer is：4", "4"),
        ("Answer:\n\\boxed{4}", "4"),
        ("Answer: 3\nAnswer: 4\nGood bye.", "4"),
        ("Answer: 3 and \\boxed{4}", "4"),
        ("I can't say.", None),
        ("", None),
        (r"\boxed{}", None),
    ],
)
def test_the_last_box_counts_and_else_the_last_label(text, pred) -> None:
    assert math(text, "never", verify="text")["pred"] == pred


def test_a_config_says_where_answers_are_and_what_each_result_is_worth() -> None:
    assert math("Answer: 4", "4", extract=("boxed",), miss_score=-1.0)["score"] == -1.0
    assert math(r"\boxed{3} Answer: 4", "4", extract=("answer", "boxed"), score=2.0)["score"] == 2.0
    assert math(r"\boxed{0.25}", r"\frac{1}{4}", verify="text")["score"] == 1.0
    assert math(r"\boxed{2^{-1}}", r"\frac{1}{2}", verify="text")["score"] == 0.0


@pytest.mark.parametrize("truth", [None, {}, [], "", " ", ["1", None], [[1]]])
@pytest.mark.parametrize("function", [MathAnswer, DapoMath])
def test_a_ground_truth_that_is_no_answer_is_refused(function, truth) -> None:
    assert repr(truth) in (function.check_row(function.Config(), truth) or "")
    assert function.check_row(function.Config(), r"\frac{1}{2}") is None


@pytest.mark.parametrize(
    ("text", "truth", "config", "score"),
    [
        ("…\nAnswer: 34", "34", {}, 1.0),
        ("…\nAnswer: $34$", "34", {}, 1.0),
        ("…\n**Answer:** \\boxed{34}.", 34, {}, 1.0),
        ("…\nANSWER : 034", "34", {}, 1.0),
        ("…\nAnswer： 34。", "34", {}, 1.0),
        ("…\n**Answer：** （1，2）。", "(1,2)", {}, 1.0),
        ("…\nAnswer: \\frac12", "\\dfrac{1}{2}", {}, 1.0),
        ("…\nAnswer: 35", "34", {}, -1.0),
        ("Answer: 34\nAnswer: 35", "34", {}, -1.0),
        ("the answer is 34", "34", {}, -1.0),
        ("34", "34", {}, -1.0),
        ("", "34", {}, -1.0),
        ("Answer: 34\n" + "x" * 300, "34", {}, -1.0),
        ("Answer: 34\n" + "x" * 300, "34", {"window": 400}, 1.0),
        ("\\boxed{34}", "34", {"extract": "boxed"}, 1.0),
        ("Answer: 34", "34", {"extract": "boxed"}, -1.0),
        ("Answer: 2^{-1}", "0.5", {}, -1.0),
        ("Answer: 2^{-1}", "0.5", {"verify": "symbolic", "processes": 1}, 1.0),
        ("Answer: 1", "34", {"miss_score": 0.0}, 0.0),
    ],
)
def test_dapo_math_wants_the_answer_on_its_line_near_the_end(text, truth, config, score) -> None:
    parts = dapo(text, truth, **config)
    assert parts["score"] == score
    assert parts["correct"] == float(score > 0)


def test_math_verify_is_right_in_any_thread() -> None:
    """math-verify's own calls would fail in a thread, since its signals need the main thread."""
    failed: list[type] = []

    def plainly() -> None:
        try:
            parse("1/2")
        except ValueError as error:
            failed.append(type(error))

    alone = threading.Thread(target=plainly)
    alone.start()
    alone.join()
    assert failed == [ValueError]
    results: list[float] = []

    def work() -> None:
        results.extend(math(f"\\boxed{{{n}^2 x}}", f"x\\cdot {n * n}")["score"] for n in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 15


NUMBER, EXPRESSION = r"\frac{1}{2}", "x+1"


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (HANGS, NUMBER),
        ("10000000!", NUMBER),
        (r"\frac{" * 40 + "1" + "}{2}" * 40, NUMBER),
        pytest.param("10^{10^{10}}", NUMBER, marks=pytest.mark.nightly),
        pytest.param("(x+1)^{100000}", EXPRESSION, marks=pytest.mark.nightly),
        pytest.param(r"\sin(2^{10^{11}})", NUMBER, marks=pytest.mark.nightly),
        pytest.param(HANGS, EXPRESSION, marks=pytest.mark.nightly),
        pytest.param("(x+1)^{100000}", NUMBER, marks=pytest.mark.nightly),
        pytest.param(r"\sin(2^{10^{11}})", EXPRESSION, marks=pytest.mark.nightly),
    ],
)
def test_an_answer_that_takes_too_long_by_itself_is_wrong(answer, truth) -> None:
    parts = math(f"\\boxed{{{answer}}}", truth, format_score=-1.0, verify_timeout=2.0)
    assert (parts["score"], parts["correct"]) == (-1.0, 0.0)


def test_a_truth_that_cannot_be_evaluated_is_a_timeout_and_the_next_one_is_scored(
    manager, sample
) -> None:
    function = MathAnswer(MathConfig(processes=1, verify_timeout=1.0), PluginContext())
    naive = manager(function.compute_score, workers=2)

    async def main() -> dict[str, Any]:
        scorer = Scorer(naive, timeout=60.0)
        for name, answer, truth in (
            ("hung", "0.5", HANGS),
            ("both", HANGS, "2^{10^{11}}"),
            ("good", "0.5", "1/2"),
            ("bad", "0.6", "1/2"),
        ):
            scorer.add(
                sample(name, f"\\boxed{{{answer}}}", ground_truth=truth), group=0, group_size=4
            )
        return dict(await scorer.finish())

    outcomes = asyncio.run(main())
    for name, truth in (("hung", HANGS), ("both", "2^{10^{11}}")):
        assert outcomes[name].kind is FailureKind.TIMEOUT
        assert truth in outcomes[name].message
    assert [outcomes[name].value for name in ("good", "bad")] == [1.0, 0.0]
    assert isinstance(outcomes["good"], Score)


def program(tmp_path: Path, body: str, first: str = "") -> MathProcesses:
    """Return processes with another program: it runs `first`, answers the set-up request, and runs `body` for each comparison."""
    path = tmp_path / "program.py"
    path.write_text(
        f"import json, sys\n{first}\n"
        "def say(**reply):\n    print(json.dumps({'number': request['number'], **reply}), flush=True)\n"
        "for line in sys.stdin:\n    request = json.loads(line)\n"
        f"    if 'truths' not in request:\n        say()\n        continue\n    {body}\n"
    )
    return MathProcesses(1, path)


def test_a_process_that_dies_is_an_error_with_its_code_and_is_replaced(tmp_path) -> None:
    processes = program(tmp_path, "sys.exit(7)")
    for _ in range(2):
        with pytest.raises(RewardError, match="exit code 7"):
            processes.equal(["1"], "2", limit=60.0)


def test_what_sympy_raises_is_an_error_where_the_truth_is_the_cause_and_else_a_wrong_answer() -> (
    None
):
    processes = MathProcesses(1)
    raises = r"(\frac{0}{0}, 1)"
    with pytest.raises(RewardError, match="TypeError"):
        processes.equal([raises], "(1, 2)", limit=60.0)
    assert not processes.equal(["(1, 2)"], raises, limit=60.0)
    assert processes.equal(["1/2"], "0.5", limit=60.0)
    processes.close()
    processes.close()


def test_a_process_that_does_not_keep_its_limit_is_killed(tmp_path) -> None:
    pids = tmp_path / "pids"
    note = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid()))"
    processes = program(tmp_path, "time.sleep(600)", first=note)
    with pytest.raises(MathTimeoutError):
        processes.equal(["1"], "2", limit=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


@pytest.mark.parametrize("end", ["SIGALRM", "SIGSEGV", "MemoryError: "])
@pytest.mark.parametrize("failing", ["answer == 'a'", "truths == ['t']"])
def test_a_comparison_without_a_result_is_wrong_unless_the_truth_alone_has_none(
    tmp_path, end, failing
) -> None:
    asked = tmp_path / "asked"
    body = (
        "answer, truths = request['answer'], request['truths']\n"
        f"    print(*truths, answer, file=open({str(asked)!r}, 'a'))\n"
        f"    say(**({{'error': {end!r}}} if {failing} else {{'equal': True}}))"
    )
    processes = program(tmp_path, body)
    if "truths" in failing:
        with pytest.raises(MathTimeoutError if end == "SIGALRM" else RewardError):
            processes.equal(["t"], "a", limit=60.0)
    else:
        assert not processes.equal(["t"], "a", limit=60.0)
    assert asked.read_text() == "t a\nt 1\n"
    processes.close()


@pytest.mark.parametrize(
    "happens",
    ["bytearray(1 << 62)", "os.kill(os.getpid(), 11)", "os.abort()", "f(f)", "time.sleep(600)"],
)
def test_what_an_answer_does_to_its_comparison_ends_neither_the_process_nor_the_next_one(
    tmp_path, happens
) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(Path(math_worker.__file__).parent)!r})\n"
        "import math_worker\n"
        "f = lambda g: g(g)\n"
        f"math_worker.compare = lambda truths, answer: answer != 'a' or {happens}\n"
        "math_worker.serve(1 << 40)\n"
    )
    processes = MathProcesses(1, path)
    assert processes.equal(["t"], "b", limit=60.0)
    before = processes._pool.pids
    assert not processes.equal(["t"], "a", limit=1.0)
    assert processes.equal(["t"], "b", limit=60.0)
    assert processes._pool.pids == before
    processes.close()


def test_a_heavy_answer_does_not_hold_the_others() -> None:
    processes = MathProcesses(2)
    processes._pool.start()
    with ThreadPoolExecutor(1) as threads:
        heavy = threads.submit(processes.equal, ["1/2"], HANGS, limit=600.0)
        for n in range(1, 9):
            assert processes.equal([f"{n}/8"], str(n / 8), limit=60.0)
        assert not heavy.done()
        processes.close()
        with pytest.raises(InterruptedError):
            heavy.result()


def test_no_process_outlives_a_run_that_is_killed() -> None:
    source = (
        "import threading, time\n"
        "from dovetail_rewards.functions.math_processes import MathProcesses\n"
        "processes = MathProcesses(1)\n"
        "assert processes.equal(['1/2'], '0.5', limit=60.0)\n"
        f"threading.Thread(target=processes.equal, args=(['1/2'], {HANGS!r}), kwargs={{'limit': 3.0}}).start()\n"
        "print(*processes._pool.pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        time.sleep(0.5)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1
        run.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, (pid, *map(int, children)))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_waiting_for_a_process_does_not_count_towards_the_limit(tmp_path) -> None:
    busy, go_on = tmp_path / "busy", tmp_path / "go on"
    body = (
        f"open({str(busy)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
        "    time.sleep(0.1); say(equal=True)"
    )
    processes = program(tmp_path, body, first="import os, time")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(processes.equal, ["1"], "1", limit=120.0)
        while not busy.exists():
            time.sleep(0.01)
        waits = threads.submit(processes.equal, ["1"], "1", limit=1.0)
        time.sleep(2.5)
        go_on.touch()
        assert [first.result(), waits.result()] == [True, True]
    processes.close()


def test_a_forked_child_has_processes_of_its_own() -> None:
    processes = MathProcesses(1)
    assert processes.equal(["1/2"], "0.5", limit=60.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if processes.equal(["1/2"], "0.5", limit=60.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert processes.equal(["1/4"], "0.25", limit=60.0)
    processes.close()


def test_without_math_verify_the_function_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(math_processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginNeedsError) as error:
        MathAnswer(MathConfig(), PluginContext())
    assert "dovetail-rewards[math]" in (error.value.hint or "")
    assert MathAnswer(MathConfig(verify="text"), PluginContext()).config.verify == "text"
