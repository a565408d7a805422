"""The parallel manager: processes are killed if they hang, replaced if they die, and ended with the manager."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import Failure, FailureKind, PluginContext, RunningTime, Score
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.manager_config import ParallelConfig
from dovetail_rewards.managers.parallel import ParallelManager
from dovetail_rewards.managers.wire import Garbled, arguments_of, pack_outcome, unpack_outcome
from dovetail_rewards.process_pool import MAX_PRINTED_BYTES
from dovetail_rollouts import RewardCall, RewardFunctions, configured_functions

Make = Callable[..., ParallelManager]


@pytest.fixture
def parallel(tmp_path: Path) -> Iterator[Make]:
    """Makes started managers around the `compute_score` of a file's source."""
    made: list[ParallelManager] = []

    def make(source: str, **config: Any) -> ParallelManager:
        file = tmp_path / f"reward_{len(made)}.py"
        file.write_text(source)
        section = RewardSection(function=PluginSection(path=str(file)))
        context = PluginContext(reward_functions=configured_functions(section, PluginContext()))
        made.append(ParallelManager(ParallelConfig(**{"workers": 2, **config}), context))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


WHO = "import os\ndef compute_score(solution_str):\n    return {'score': 1.0, 'pid': os.getpid()}\n"


def test_samples_are_scored_in_other_processes_by_all_of_them(parallel, sample, run) -> None:
    source = "import time, os\ndef compute_score():\n    time.sleep(0.01)\n    return {'score': 1, 'pid': os.getpid()}"
    manager = parallel(source)
    outcomes = run(manager, [sample(f"s{i}") for i in range(40)])
    used = {int(outcome.components["pid"]) for outcome in outcomes.values()}
    assert used == set(manager.pids)
    assert len(used) == 2
    assert os.getpid() not in used


def test_installed_functions_are_made_again_by_name(sample, run) -> None:
    functions = configured_functions(RewardSection(), PluginContext())
    manager = ParallelManager(ParallelConfig(workers=1), PluginContext(reward_functions=functions))
    manager.start()
    try:
        rows = [sample("a", "#### 18", data_source="openai/gsm8k", ground_truth="18")]
        rows += [sample("b", "#### 17", data_source="openai/gsm8k", ground_truth="18")]
        rows += [sample("c", "x", data_source="nothing/here")]
        outcomes = run(manager, rows)
    finally:
        manager.close()
    assert [getattr(outcome, "value", None) for outcome in outcomes.values()] == [1.0, 0.0, None]
    assert "'nothing/here'" in outcomes["c"].message


def test_functions_run_in_the_main_thread_where_signals_work(parallel, sample, run) -> None:
    source = """
import signal, threading

def compute_score():
    rang = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()
    return float(len(rang) and threading.current_thread() is threading.main_thread())
"""
    assert run(parallel(source, workers=1), [sample()])["s0"].value == 1.0


def test_a_worker_gets_what_its_function_asks_for_alone(sample) -> None:
    row = sample(data_source="d", extra_info={"x": 1}, response_ids=np.arange(3))
    seen = RewardCall(lambda solution_str, ground_truth: 1.0).fields
    assert arguments_of(row, seen) == {
        "data_source": "d",
        "solution_str": "4",
        "ground_truth": "4",
    }


def test_rows_arrive_as_they_are_and_awaitables_are_awaited(parallel, sample, run) -> None:
    source = """
import asyncio, numpy as np

async def compute_score(ground_truth, extra_info, response_ids, prompt):
    await asyncio.sleep(0.001)
    assert isinstance(extra_info["array"], np.ndarray) and isinstance(extra_info["pair"], tuple)
    return {"score": float(extra_info["array"].sum()), "tokens": len(response_ids), "pred": prompt,
            "token_rewards": [0.0, 0.0, 6.0], "odd": {1, 2}, "n": np.int64(4), "a": np.arange(2)}
"""
    row = sample(
        extra_info={"array": np.arange(4), "pair": (1, 2)},
        response_ids=np.arange(3),
        prompt=[{"role": "user", "content": "∑"}],
    )
    outcome = run(parallel(source, workers=1), [row])["s0"]
    assert isinstance(outcome, Score), outcome
    assert outcome.value == 6.0
    assert outcome.token_rewards.tolist() == [0.0, 0.0, 6.0]
    assert outcome.components == {"tokens": 3.0, "n": 4.0}
    assert outcome.extras["pred"] == [{"role": "user", "content": "∑"}]
    assert outcome.extras["a"] == [0, 1]
    assert outcome.extras["odd"] == "{1, 2}"


def test_a_dead_worker_is_replaced_and_says_how_it_died(parallel, sample, run) -> None:
    source = "import os\ndef compute_score(solution_str):\n    return os._exit(7) if solution_str == 'die' else 1.0\n"
    manager = parallel(source, workers=1)
    before = manager.pids
    outcomes = run(manager, [sample("a"), sample("b", "die"), sample("c"), sample("d")])
    assert [getattr(o, "value", None) for o in outcomes.values()] == [1.0, None, 1.0, 1.0]
    failure = outcomes["b"]
    assert failure.kind is FailureKind.CRASH
    assert failure.retryable
    assert "exit code 7" in failure.message
    assert len(manager.pids) == 1
    assert manager.pids != before


def test_a_function_that_spins_is_killed_in_its_time_and_waiting_does_not_count(
    parallel, sample, run
) -> None:
    source = "def compute_score(solution_str):\n    while solution_str == 'spin':\n        pass\n    return 1.0\n"
    manager = parallel(source, workers=1)
    rows = [sample(f"s{i}", "spin" if i == 1 else "ok") for i in range(10)]
    outcomes = run(manager, rows, timeout=2.0)  # the rows after it have waited for as long
    assert outcomes["s1"].kind is FailureKind.TIMEOUT
    assert "within 2 s" in outcomes["s1"].message
    assert sum(isinstance(outcome, Score) for outcome in outcomes.values()) == 9


def test_children_of_a_killed_worker_die_with_it(parallel, sample, run, tmp_path) -> None:
    note = tmp_path / "child"
    source = f"""
import subprocess, sys, time

def compute_score(solution_str):
    if solution_str == "hang":
        time.sleep(600)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(note)!r}, "w").write(str(child.pid))
    return 1.0
"""
    manager = parallel(source, workers=1)
    assert run(manager, [sample("a", "start a child")])["a"].value == 1.0
    assert alive(int(note.read_text()))
    assert run(manager, [sample("b", "hang")], timeout=0.5)["b"].kind is FailureKind.TIMEOUT
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_what_a_function_prints_reaches_nobodys_answer(parallel, sample, run, capfd) -> None:
    source = "import os\ndef compute_score():\n    print('x' * 100)\n    os.write(1, b'raw')\n    return 1.0\n"
    assert run(parallel(source, workers=1), [sample()])["s0"].value == 1.0
    assert capfd.readouterr().out == ""


def test_what_a_forked_child_of_a_function_returns_is_no_score(parallel, sample, run) -> None:
    source = """
import os, time

def compute_score(solution_str):
    if os.fork() == 0:
        return 0.777
    time.sleep(0.2)
    return 1.0
"""
    outcomes = run(parallel(source, workers=1), [sample("a"), sample("b")])
    assert [outcome.value for outcome in outcomes.values()] == [1.0, 1.0]


def test_of_what_a_worker_prints_the_first_mebibyte_is_shown_and_no_escape_of_a_terminal(
    parallel, sample, run, capsys
) -> None:
    source = """
import os

def compute_score():
    print("\\x1b[31mred")
    for _ in range(100):
        os.write(2, b"x" * (1 << 16))
    return 1.0
"""
    assert run(parallel(source, workers=1), [sample()])["s0"].value == 1.0
    shown = capsys.readouterr().err
    assert "\\x1b[31mred" in shown
    assert str(MAX_PRINTED_BYTES) in shown
    assert len(shown) < (1 << 20) + 1000


def test_a_worker_that_talks_nonsense_is_a_crash(parallel, sample, run) -> None:
    source = """
import os, stat

def compute_score(solution_str):
    if solution_str == "talk":
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, b'{"not": "a frame"}' * 4)
            except OSError:
                pass
    return 1.0
"""
    outcomes = run(parallel(source, workers=1), [sample("a", "talk"), sample("b")])
    assert outcomes["a"].kind is FailureKind.CRASH
    assert outcomes["b"].value == 1.0


def test_functions_that_can_not_be_named_elsewhere_are_refused_with_a_way_out() -> None:
    functions = RewardFunctions(default=lambda: 1.0)
    manager = ParallelManager(ParallelConfig(), PluginContext(reward_functions=functions))
    with pytest.raises(ConfigError, match="lambda") as error:
        manager.start()
    assert "reward.function={path: my_reward.py" in str(error.value)


def test_functions_that_fail_to_load_in_a_worker_stop_the_start(parallel) -> None:
    source = f"import os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('only at home')\ndef compute_score():\n    return 1.0\n"
    with pytest.raises(RewardError, match="only at home"):
        parallel(source)


def test_a_closed_manager_answers_with_failures(parallel, sample, run) -> None:
    manager = parallel(WHO, workers=1)
    pids = manager.pids
    manager.close()
    manager.close()
    assert not any(alive(pid) for pid in pids)
    assert run(manager, [sample()])["s0"].kind is FailureKind.CRASH


def test_closing_answers_what_is_still_waiting(parallel, sample) -> None:
    manager = parallel("import time\ndef compute_score():\n    time.sleep(600)\n", workers=1)

    async def main() -> Any:
        scoring = asyncio.gather(
            *(manager.score([sample(f"s{i}")], RunningTime()) for i in range(3))
        )
        await asyncio.sleep(0.1)
        await asyncio.to_thread(manager.close)
        return await scoring

    outcomes = asyncio.run(asyncio.wait_for(main(), 120))
    assert all(isinstance(outcome, Failure) for (outcome,) in outcomes)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends workers on Linux alone")
def test_workers_die_with_a_controller_that_is_killed_even_where_they_never_return(
    tmp_path,
) -> None:
    reward = tmp_path / "spin.py"
    reward.write_text("def compute_score():\n    while True:\n        pass\n")
    script = f"""
import asyncio, sys
from dovetail.sections import PluginSection, RewardSection
from dovetail.interfaces import PluginContext
from dovetail.interfaces import RunningTime
from dovetail_sdk.testing import make_sample
from dovetail_rollouts import configured_functions
from dovetail_rewards.manager_config import ParallelConfig
from dovetail_rewards.managers.parallel import ParallelManager

functions = configured_functions(RewardSection(function=PluginSection(path={str(reward)!r})), PluginContext())
manager = ParallelManager(ParallelConfig(workers=2), PluginContext(reward_functions=functions))
manager.start()

async def main():
    samples = [make_sample(str(i)) for i in range(2)]
    scoring = asyncio.gather(*(manager.score([sample], RunningTime()) for sample in samples))
    await asyncio.sleep(0.2)
    sys.stdout.write(repr(manager.pids) + "\\n"); sys.stdout.flush()
    await scoring

asyncio.run(main())
"""
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pids = json.loads(controller.stdout.readline())
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_samples_stream_while_others_are_still_scored(parallel, sample, tmp_path) -> None:
    mark = tmp_path / "the others are scored"
    source = f"""
import pathlib, time

def compute_score(solution_str):
    while solution_str == "slow" and not pathlib.Path({str(mark)!r}).exists():
        time.sleep(0.01)
    return 1.0
"""
    manager = parallel(source)

    async def one(name: str) -> Any:
        return await manager.score([sample(name, name)], RunningTime())

    async def main() -> None:
        slow = asyncio.create_task(one("slow"))
        await asyncio.gather(*(one(f"quick {i}") for i in range(5)))
        assert not slow.done()
        mark.touch()
        (outcome,) = await slow
        assert outcome.value == 1.0

    asyncio.run(asyncio.wait_for(main(), 240))


floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
outcomes = st.one_of(
    st.builds(
        Failure,
        kind=st.sampled_from(FailureKind),
        message=st.text(max_size=20),
        retryable=st.booleans(),
    ),
    st.builds(
        Score,
        value=floats,
        components=st.dictionaries(st.text(max_size=3), floats, max_size=3),
        extras=st.dictionaries(
            st.text(max_size=3), st.text(max_size=5) | st.none() | st.lists(floats), max_size=3
        ),
    ),
)


@given(outcomes)
def test_outcomes_survive_the_wire(outcome) -> None:
    got = unpack_outcome(pack_outcome(outcome))
    if isinstance(outcome, Failure):
        assert got == outcome
    else:
        assert (got.value, got.components, got.extras) == (
            outcome.value,
            outcome.components,
            outcome.extras,
        )


@given(
    st.binary(max_size=30)
    | st.from_regex(r'\["(score|failure)", (NaN|1e999|"x"|1), null, \{\}(, \{\})?\]')
)
def test_nothing_but_an_outcome_is_taken_for_one(payload) -> None:
    try:
        outcome = unpack_outcome(payload)
    except Garbled:
        return
    assert isinstance(outcome, Failure) or abs(outcome.value) < 3.5e38
