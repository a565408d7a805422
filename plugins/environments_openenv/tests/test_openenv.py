"""An OpenEnv environment as authors publish it, a folder with a uv project, in the interpreter that `make proofs` sets up."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, Policy, draw, said

from dovetail.interfaces import Failure, FailureKind, PluginContext, RolloutRequest
from dovetail_environments import EnvironmentProcessError
from dovetail_environments.config import EnvironmentRowsConfig, EnvironmentsConfig
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments.testing import EnvironmentConformance
from dovetail_environments_openenv.config import OpenEnvConfig
from dovetail_environments_openenv.openenv_servers import OpenEnv
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

PYTHON = Path(__file__).parents[3] / ".venv-openenv" / "bin" / "python"
NEEDED = pytest.mark.skipif(
    not PYTHON.exists(), reason="OpenEnv is not installed here; `make proofs` has it"
)


def proof(test: Any) -> Any:
    """Mark a test that needs OpenEnv."""
    return NEEDED(pytest.mark.proofs(test))


PYPROJECT = """
[project]
name = "lowest"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["openenv>=0.10,<0.11"]
"""
APP = '''
import os
import random

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=1, le=20)


class Hint(Observation):
    text: str


class Guessing(Environment):
    """Guess a number of 1 to 20 in six steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **_):
        self._wanted, self._left = random.Random(seed).randint(1, 20), 6
        return Hint(text=f"Guess my number of 1 to 20, number {seed}.")

    def step(self, action, timeout_s=None, **_):
        self._left -= 1
        if action.number == 13:
            raise LookupError("thirteen is not a number")
        if action.number == 14:
            os._exit(3)
        if action.number == 15:
            return Hint(text="", done=True, reward=float("nan"))
        right = action.number == self._wanted
        hint = "Yes." if right else "higher" if action.number < self._wanted else "lower"
        return Hint(text=hint, done=right or not self._left, reward=float(right) - 0.1)

    @property
    def state(self):
        return self._state

    # TASKS


app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=2)
'''
TASKS = """
    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 3, "test": 2}[split]
"""


def project(folder: Path, app: str = APP) -> Path:
    """Write the project of an environment."""
    (folder / "server").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "server" / "__init__.py").touch()
    (folder / "server" / "app.py").write_text(app)
    return folder


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("guessing") / "env")


@pytest.fixture(scope="module")
def url(guessing: Path) -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PYTHON,
        "-m",
        "uvicorn",
        "server.app:app",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, cwd=guessing) as server:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def section(**settings: Any) -> OpenEnvConfig:
    given = {"python": str(PYTHON), "workers": 2, "start_seconds": 600.0, **settings}
    return OpenEnvConfig(name="openenv", **given)


def rows_of(config: OpenEnvConfig, path: str = "it") -> Any:
    rows = EnvironmentRowsConfig(name="environments", environments={"it": config})
    return EnvironmentRows(rows, PluginContext()).read([path])


def halving(_: RolloutRequest, prompt: str) -> str:
    """Guess the middle of the remaining range, by the hints so far; never a number at which the environment fails."""
    low, high = 1, 20
    for number, hint in re.findall(r"assistant\s*(\d+).*?(higher|lower)", prompt, re.DOTALL):
        low, high = (int(number) + 1, high) if hint == "higher" else (low, int(number) - 1)
    middle = (low + high) // 2
    return str(middle if middle not in (13, 14, 15) else 12 if low <= 12 else 16)


def played(config: OpenEnvConfig, row: Any, policy: Policy, n: int = 1) -> Drawn:
    loop_config = EnvironmentsConfig(name="environments", environments={"it": config})
    loop = EnvironmentsLoop(loop_config, PluginContext(tokenizer=template_tokenizer(CHATML)))
    loop.start()
    try:
        return draw(loop, policy, n=n, messages=row["prompt"], extra_info=row["extra_info"])
    finally:
        loop.close()


def output(drawn: Drawn) -> Any:
    assert not isinstance(drawn.sample.outcome, Failure), drawn.sample.outcome
    assert drawn.sample.trajectory is not None
    return drawn.sample.trajectory.output


@proof
def test_fifty_episodes_on_servers_of_uv_are_scored_and_trained_on_as_served(
    guessing: Path,
) -> None:
    config = section(project=str(guessing), tasks=5)
    rows = rows_of(config)
    assert [row["prompt"][0]["content"][:20] for row in rows] == ["Guess my number of 1"] * 5
    rewards = []
    for row in rows[:2]:
        drawn = played(config, row, halving, n=25)
        drawn.audit()
        for sample in drawn.samples:
            assert sample.trajectory is not None, sample.outcome
            parts = sample.trajectory.output["parts"]
            assert parts == {"turns": len(sample.trajectory.turns), "invalid": 0}
            assert len(sample.sequences) == 1
            rewards.append(sample.trajectory.output["reward"])
    assert len(rewards) == 50
    found = {round(reward, 6) for reward in rewards}
    assert 0.9 in found
    assert found <= {0.9, -0.1}


@proof
def test_a_server_that_runs_already_is_asked_and_rewards_are_summed(url: str) -> None:
    config = section(url=url, tasks=2, reward="sum", instruction="Answer with a number.")
    [row, _] = rows_of(config)
    assert row["prompt"][0] == {"role": "system", "content": "Answer with a number."}
    found = output(played(config, row, said("1")))
    turns = found["parts"]["turns"]
    assert found["reward"] == pytest.approx(-0.1 * turns + (turns < 6))


@proof
def test_a_refused_action_is_shown_to_the_policy_and_counted(url: str) -> None:
    prompts: list[str] = []

    def policy(request: RolloutRequest, prompt: str) -> str:
        prompts.append(prompt)
        return ("seven", "21", "1")[request.streams[0].turn]

    config = section(url=url, tasks=1, steps=3)
    [row] = rows_of(config)
    assert output(played(config, row, policy))["parts"] == {"turns": 3, "invalid": 2}
    assert "number: Input should be a valid integer" in prompts[1]
    assert "number: Input should be less than or equal to 20" in prompts[2]
    config = section(url=url, tasks=1, steps=1, at_limit=-2.0)
    assert output(played(config, row, said("x"))) == {
        "environment": "it",
        "reward": -2.0,
        "parts": {"turns": 1, "invalid": 1},
    }


@proof
@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("13", "thirteen is not"),
        ("14", "Connection"),
        ("15", "expected finite numbers"),
    ],
    ids=["raises", "dies", "nan"],
)
def test_what_goes_wrong_is_a_failure_and_the_next_episode_has_a_server_again(
    guessing: Path, url: str, number: str, message: str
) -> None:
    where = {"project": str(guessing)} if number == "14" else {"url": url}
    config = section(**where, tasks=1, workers=1)
    [row] = rows_of(config)
    drawn = played(
        config, row, lambda request, _: "1" if request.streams[0].sample else number, n=2
    )
    failed, scored = drawn.samples
    assert isinstance(failed.outcome, Failure)
    assert failed.outcome.kind is FailureKind.ENVIRONMENT
    assert message in failed.outcome.message
    assert scored.trajectory is not None
    assert scored.trajectory.output["parts"]["turns"] == 6


@proof
def test_tasks_are_those_of_the_environments_splits(tmp_path: Path) -> None:
    app = APP.replace("    # TASKS\n", TASKS).replace(
        "number {seed}", "task {_['split']} {_['index']}"
    )
    config = section(project=str(project(tmp_path / "env", app)), held_out=5)
    assert [row["extra_info"]["task"]["index"] for row in rows_of(config)] == [0, 1, 2]
    assert [row["prompt"][0]["content"] for row in rows_of(config, "it/held_out")] == [
        f"Guess my number of 1 to 20, task test {index}." for index in range(2)
    ]


@proof
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"project": "nowhere", "url": None}, "has no pyproject.toml"),
        ({"app": "server.other:app", "url": None}, "exited prematurely"),
        (
            {"action": "numbr", "project": None},
            "'numbr' (setting `action`); expected one of number",
        ),
        ({"observation": "txt", "project": None}, "'txt' (setting `observation`); expected one of"),
        ({"project": None, "url": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
    ],
    ids=["folder", "app", "action", "observation", "url"],
)
def test_what_the_config_gets_wrong_is_said_before_step_1(
    guessing: Path, url: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentProcessError, match=re.escape(message)):
        rows_of(section(**{"project": str(guessing), "url": url, **settings}))


def test_an_interpreter_without_openenv_is_told_how_to_get_it() -> None:
    with pytest.raises(EnvironmentProcessError) as caught:
        rows_of(OpenEnvConfig(name="openenv", project="word_env"))
    assert "openenv<0.11,>=0.10 (not installed)" in str(caught.value)
    assert "-m pip install 'openenv>=0.10,<0.11' uv" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither `project`"),
        ({"project": "x", "url": "http://127.0.0.1:1"}, "both `project` and `url`"),
        ({"url": "127.0.0.1:8000"}, "http://HOST:PORT"),
    ],
)
def test_a_project_or_a_url_has_to_be_given(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenEnvConfig(name="openenv", **given)


@proof
class TestOpenEnv(EnvironmentConformance):
    plugin = OpenEnv
    turns = ("1",)

    @pytest.fixture(autouse=True)
    def server(self, url: str) -> None:
        self.url = url

    def make_config(self) -> Any:
        return section(url=self.url, tasks=6, held_out=6)
