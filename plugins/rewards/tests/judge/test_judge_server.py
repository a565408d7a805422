"""A judge that starts its own server: a stand-in for an interpreter with vLLM, which really serves, dies and refuses."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import RewardError
from dovetail.interfaces import FailureKind, PluginContext
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.judge_server_config import JudgeServerConfig
from dovetail_rewards.models.judge import JudgeManager

Judge = Callable[..., JudgeManager]


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    """Makes judges that serve themselves with the stand-in; those that were started are closed."""
    python = tmp_path / "python"
    script = Path(__file__).with_name("serving_python.py").read_text()
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o700)
    made: list[JudgeManager] = []

    def make(role: str = "", **server: Any) -> JudgeManager:
        environment = {"DIED": str(tmp_path / "died")}
        config = JudgeConfig(
            name="judge",
            model="some/judge",
            template="{{ response }}",
            backoff=0.01,
            server=JudgeServerConfig(python=str(python), environment=environment, **server),
        )
        made.append(JudgeManager(config, PluginContext(run_directory=tmp_path, role=role)))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def process_of(log: Path) -> int:
    """Process id of the server that prints there."""
    return int(re.findall(r"serving (\d+)", log.read_text())[-1])


def test_it_scores_with_a_key_and_on_its_devices(judge, sample, run, tmp_path) -> None:
    manager = judge(devices=(2, 5))
    manager.start()
    outcome = run(manager, [sample("a", "fine")])["a"]
    assert outcome.value == 1.0
    assert outcome.extras["judgement"] == "devices 2,5, 2 of them. score: 1"
    pid = process_of(tmp_path / "logs" / "judge.log")
    manager.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_ends_with_a_run_that_is_killed(judge, tmp_path) -> None:
    config = judge().config
    program = f"""
import pathlib, time
from dovetail.interfaces import PluginContext
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.judge_server_config import JudgeServerConfig
from dovetail_rewards.models.judge import JudgeManager
context = PluginContext(run_directory=pathlib.Path({str(tmp_path)!r}))
JudgeManager({config!r}, context).start()
print("started", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"started\n"
        pid = process_of(tmp_path / "logs" / "judge.log")
        os.kill(pid, 0)
        run.kill()
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"the server, process {pid}, is still there")


def test_one_that_dies_is_started_again_and_its_samples_are_scored(
    judge, sample, run, tmp_path, caplog
) -> None:
    manager = judge(role="wise")
    manager.start()
    samples = [sample("a", "die once"), *(sample(f"s{i}", f"fine {i}") for i in range(8))]
    with caplog.at_level(logging.INFO, "dovetail"):
        outcomes = run(manager, samples)
    assert [outcome.value for outcome in outcomes.values()] == [1.0] * 9
    assert "the judge's server was ended by SIGKILL" in caplog.text
    assert "something has gone wrong" in caplog.text
    log = tmp_path / "logs" / "judge-wise.log"
    assert process_of(log) != process_of(log.with_name("judge-wise.log.1"))


def test_one_that_dies_too_often_is_gone_and_nothing_becomes_a_number(judge, sample, run) -> None:
    manager = judge(restarts=1)
    manager.start()
    outcomes = run(manager, [sample("a", "die"), sample("b", "die too")])
    for outcome in outcomes.values():
        assert outcome.kind is FailureKind.CRASH
        assert not outcome.retryable
        assert "was ended by SIGKILL, and is not started again" in outcome.message
    later = run(manager, [sample("c", "fine")])["c"]
    assert later.kind is FailureKind.CRASH


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("no such model", None),
        ("/usr/bin/python: No module named vllm", "interpreter of an environment that has vLLM"),
    ],
)
def test_one_that_does_not_start_says_why(judge, said, hint) -> None:
    manager = judge(arguments={"refuse": said})
    with pytest.raises(RewardError, match="did not start: it ended with status 1") as caught:
        manager.start()
    assert caught.value.message.endswith(f"\n{said}")
    assert (hint in caught.value.hint) if hint else caught.value.hint is None


def test_one_that_never_answers_is_given_up(judge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        manager = judge(start_timeout=0.5, port=taken.getsockname()[1])
        with pytest.raises(RewardError, match=r"judge's server (was not healthy|did not start)"):
            manager.start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither is set"),
        ({"url": "http://127.0.0.1:1/v1", "server": JudgeServerConfig()}, "both is set"),
        ({"server": JudgeServerConfig(), "auth_env": "KEY"}, "gets a random key"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeConfig(name="judge", model="m", template="x", **settings)


@pytest.mark.parametrize("devices", [(-1,), (1, 1)])
def test_devices_are_indices(devices) -> None:
    with pytest.raises(ValueError, match="are no indices of accelerators"):
        JudgeServerConfig(devices=devices)
