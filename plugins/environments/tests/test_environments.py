"""Failing environments: failures are typed and counted, give no score, and do not affect the rest of the batch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from dovetail.errors import ConfigError, DataError, DovetailError, PluginBrokenError
from dovetail.interfaces import (
    EpisodeEnd,
    EpisodeError,
    Failure,
    FailureKind,
    PluginContext,
    Prompt,
    Sample,
)
from dovetail_environments.config import (
    EnvironmentRowsConfig,
    EnvironmentsConfig,
    EnvironmentSection,
    ProgramEnvironmentConfig,
)
from dovetail_environments.environment import Environment, EnvironmentTask, EpisodeScore
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.program import ProgramEnvironment
from dovetail_environments.reward import EnvironmentReward
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments.worker_pool import (
    EnvironmentProcess,
    EnvironmentProcessError,
    WorkerCommand,
)
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import draw_episodes

GOOD = """
def tasks(settings, count, held_out):
    return [{"prompt": f"say {n}", "task": {"n": n}} for n in range(count)]

def episode(settings, task, model):
    print("noise, which is not an answer")
    return float(model.chat([{"role": "user", "content": "question"}]) == "right")
"""
_BESIDE = Path(__file__).parents[3] / ".venv-openenv" / "bin" / "uv"
UV = shutil.which("uv") or (str(_BESIDE) if _BESIDE.exists() else None)
ASKING = "model.chat([{'role': 'user', 'content': 'question'}])"


def program(path: Path, source: str = GOOD, **settings: Any) -> ProgramEnvironmentConfig:
    path.write_text(source)
    return ProgramEnvironmentConfig(name="program", file=str(path), workers=2, **settings)


def bad(path: Path, body: str, **settings: Any) -> ProgramEnvironmentConfig:
    """Return the config of an environment whose episodes run `body` after the policy has answered."""
    source = f"import os, sys, time\ndef tasks(*_): return [{{'prompt': 'x'}}]\ndef episode(settings, task, model):\n    {ASKING}\n    {body}\n"
    return program(path, source, **settings)


def drawn(
    environments: Mapping[str, EnvironmentSection], rows: Sequence[str], **settings: Any
) -> list[Sample]:
    """Run an episode of each row's environment concurrently, with a policy that answers right."""
    config = EnvironmentsConfig(name="environments", environments=dict(environments), **settings)
    loop = EnvironmentsLoop(config, PluginContext(tokenizer=template_tokenizer(CHATML)))
    prompts = [
        Prompt(
            index=index,
            raw=[{"role": "user", "content": "question"}],
            extra_info={"environment": name, "task": {"n": index}},
        )
        for index, name in enumerate(rows)
    ]
    return draw_episodes(loop, prompts, said=lambda _: ["right"])


def reward_of(sample: Sample) -> Any:
    assert sample.trajectory is not None
    return sample.trajectory.output["reward"]


BODIES = {
    "dies": ("os._exit(3)", FailureKind.ENVIRONMENT, "status 3"),
    "is killed": ("os.kill(os.getpid(), 9)", FailureKind.ENVIRONMENT, "signal 9"),
    "exits": ("sys.exit(0)", FailureKind.ENVIRONMENT, "SystemExit"),
    "raises": ("raise KeyError('place')", FailureKind.ENVIRONMENT, "KeyError"),
    "never answers": ("time.sleep(60)", FailureKind.LIMIT, "episode_seconds"),
    "nan": ("return float('nan')", FailureKind.ENVIRONMENT, "nan"),
    "infinite": ("return 1e300", FailureKind.ENVIRONMENT, "1e+300"),
    "text": ("return 'good'", FailureKind.ENVIRONMENT, "'good'"),
    "nothing": ("return None", FailureKind.ENVIRONMENT, "None"),
    "nan part": (
        "return {'reward': 1, 'parts': {'form': float('nan')}}",
        FailureKind.ENVIRONMENT,
        "form",
    ),
    "no JSON": ("return {'reward': {1, 2}}", FailureKind.ENVIRONMENT, "JSON"),
    "no reward": ("return {'score': 1}", FailureKind.ENVIRONMENT, "no `reward`"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_failing_environment_has_no_score_and_the_others_go_on(case: str, tmp_path: Path) -> None:
    body, kind, said = BODIES[case]
    environments = {
        "good": program(tmp_path / "good.py"),
        "bad": bad(
            tmp_path / "bad.py", body, episode_seconds=2.0 if kind is FailureKind.LIMIT else None
        ),
    }
    samples = drawn(environments, ["good", "bad", "good"])
    failure = samples[1].outcome
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert said in failure.message
    assert samples[1].score is None
    assert samples[1].trajectory is not None
    assert samples[1].trajectory.output is None
    assert samples[1].trajectory.counts["environments/bad/failures"] == 1
    assert [reward_of(sample) for sample in (samples[0], samples[2])] == [1.0, 1.0]


def test_a_process_that_died_is_replaced_for_the_next_episode(tmp_path: Path) -> None:
    once = tmp_path / "died"
    source = f"if not os.path.exists({str(once)!r}):\n        open({str(once)!r}, 'x')\n        os._exit(1)\n    return 1.0"
    environment = attrs.evolve(bad(tmp_path / "bad.py", source), workers=1)
    samples = drawn({"bad": environment}, ["bad"] * 4)
    assert sum(isinstance(sample.outcome, Failure) for sample in samples) == 1
    scored = [sample for sample in samples if not isinstance(sample.outcome, Failure)]
    assert [reward_of(sample) for sample in scored] == [1.0] * 3


def test_at_a_limit_the_reward_is_that_of_the_config(tmp_path: Path) -> None:
    body = f"{ASKING}\n    {ASKING}\n    return 1.0"
    environment = bad(tmp_path / "long.py", body, at_limit=-0.5)
    [sample] = drawn({"long": environment}, ["long"], max_turns=2)
    assert reward_of(sample) == -0.5
    assert sample.trajectory is not None
    assert sample.trajectory.end is EpisodeEnd.TURNS
    caught = (
        f"try:\n        [{ASKING} for _ in range(9)]\n    except model.Ended:\n        return 0.25"
    )
    [sample] = drawn({"own": bad(tmp_path / "own.py", caught)}, ["own"], max_turns=2)
    assert reward_of(sample) == 0.25
    assert sample.trajectory is not None
    assert sample.trajectory.end is EpisodeEnd.TURNS


def speaking(lines: str) -> ProgramEnvironmentConfig:
    """Return the config of a command that answers every request with these lines."""
    code = f"import sys\nfor _ in sys.stdin: print({lines!r}, flush=True)"
    return ProgramEnvironmentConfig(
        name="program", command=shlex.join([sys.executable, "-c", code])
    )


def tasks_of(config: EnvironmentSection, name: str = "it") -> list[Mapping[str, Any]]:
    rows = EnvironmentRowsConfig(name="environments", environments={name: config})
    return EnvironmentRows(rows, PluginContext()).read([name])


@pytest.mark.parametrize(
    ("config", "said", "hint"),
    [
        (speaking('{"protocol": 7}'), "protocol 7; expected protocol 1", "version"),
        (speaking("hello"), "'hello'", None),
        (speaking("[1]"), "JSON object", None),
        (
            ProgramEnvironmentConfig(name="program", command="cat /dev/null"),
            "ended with status 0",
            None,
        ),
        (
            ProgramEnvironmentConfig(name="program", command="sleep 30", start_seconds=0.3),
            "within 0.3 s",
            "start_seconds",
        ),
        (
            ProgramEnvironmentConfig(name="program", command="/no/bin/python x.py"),
            "No such file",
            "python3 -m venv /no && /no/bin/python -m pip install",
        ),
    ],
    ids=["version", "text", "list", "ends", "hangs", "missing"],
)
def test_what_does_not_speak_the_protocol_is_found_before_step_1(
    config: ProgramEnvironmentConfig, said: str, hint: str | None
) -> None:
    with pytest.raises(EnvironmentProcessError) as caught:
        tasks_of(config)
    assert said in str(caught.value)
    assert "'it'" in str(caught.value)
    assert hint is None or hint in str(caught.value.hint)
    [sample] = drawn({"it": config}, ["it"])
    assert isinstance(sample.outcome, Failure)
    assert sample.outcome.kind is FailureKind.ENVIRONMENT
    assert said in sample.outcome.message


@pytest.mark.parametrize(
    ("requires", "said"),
    [("no-such-package>=2", "not installed"), ("attrs<1", "installed: 2")],
)
def test_a_missing_package_and_other_pins_are_named_with_the_line_that_installs(
    tmp_path: Path, requires: str, said: str
) -> None:
    command = WorkerCommand(
        title="environment 'it'",
        words=[sys.executable, str(Path(sys.modules[EnvironmentProcess.__module__].__file__).with_name("worker.py")), "x.py"],
        requires=[requires],
        log=tmp_path / "log",
    )  # fmt: skip
    with pytest.raises(EnvironmentProcessError) as caught:
        EnvironmentProcess(command)
    assert said in str(caught.value)
    assert f"{sys.executable} -m pip install '{requires}'" in str(caught.value.hint)


def test_no_process_is_left(tmp_path: Path) -> None:
    child = f"import subprocess\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n    return 1"
    [sample] = drawn({"it": bad(tmp_path / "it.py", child)}, ["it"])
    assert reward_of(sample) == 1
    pid = (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


@pytest.mark.parametrize("above", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["itself", "above"])
def test_a_process_ends_when_the_run_is_killed_whatever_it_does(
    tmp_path: Path, above: list[str]
) -> None:
    """This includes a process that a command starts, such as `uv run`."""
    program(
        tmp_path / "busy.py",
        f"""
import os, subprocess
def tasks(*_):
    child = subprocess.Popen(["sleep", "60"])
    with open({str(tmp_path / "pids")!r}, "w") as file:
        file.write(f"{{os.getpid()}} {{child.pid}}")
    while True: pass
""",
    )
    run = f"""
import os, signal, sys, threading, time
from pathlib import Path
from dovetail_environments import worker
from dovetail_environments.worker_pool import EnvironmentProcess, WorkerCommand
words = [*{above!r}, sys.executable, worker.__file__, {str(tmp_path / "busy.py")!r}]
process = EnvironmentProcess(WorkerCommand(title="it", words=words, log=Path({str(tmp_path / "log")!r})))
def die():
    while not Path({str(tmp_path / "pids")!r}).exists() or " " not in Path({str(tmp_path / "pids")!r}).read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=die).start()
process.ask({{"do": "tasks", "count": 1, "held_out": False}})
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    pids, deadline = (tmp_path / "pids").read_text().split(), time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Own(Environment):
    """An environment in this process, whose behaviour the task sets."""

    name = "own"
    api = ">=1.0,<2"
    found: ClassVar[Any] = None

    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        if self.found == "raises":
            raise ZeroDivisionError
        return [] if held_out else [EnvironmentTask(prompt="a", data={"n": 1}, ground_truth=2)]

    async def run(self, task: Mapping[str, Any], episode: Any) -> EpisodeScore:
        await episode.session.generate()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (EpisodeScore(reward=float("nan")), FailureKind.ENVIRONMENT),
        (0.5, FailureKind.ENVIRONMENT),
        (ZeroDivisionError("x"), FailureKind.ENVIRONMENT),
        (EpisodeError(FailureKind.SANDBOX, "x"), FailureKind.SANDBOX),
    ],
)
def test_what_an_environment_in_process_does_wrong_is_its_failure(
    monkeypatch: pytest.MonkeyPatch, found: Any, kind: FailureKind
) -> None:
    monkeypatch.setattr(Own, "found", found)
    own = EnvironmentSection(path=__file__, attribute="Own")
    monkeypatch.setattr(EnvironmentsLoop, "environment", lambda *_: Own(own, PluginContext()))
    [sample] = drawn({"own": own}, ["own"])
    assert isinstance(sample.outcome, Failure)
    assert sample.outcome.kind is kind


def test_rows_that_name_no_environment_of_the_config_fail_as_such(tmp_path: Path) -> None:
    [sample] = drawn({"sums": program(tmp_path / "x.py")}, ["sum"])
    assert isinstance(sample.outcome, Failure)
    assert sample.outcome.kind is FailureKind.HARNESS
    assert "sums" in sample.outcome.message


def test_tasks_become_rows_and_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    config = program(tmp_path / "x.py", tasks=2)
    assert tasks_of(config, "sums") == [
        {
            "prompt": [{"role": "user", "content": f"say {n}"}],
            "data_source": "sums",
            "reward_model": {"ground_truth": None},
            "extra_info": {"environment": "sums", "task": {"n": n}},
        }
        for n in range(2)
    ]
    rows = EnvironmentRows(
        EnvironmentRowsConfig(name="environments", environments={"sums": config}), PluginContext()
    )
    for path in ("sum", "sums/heldout", "other"):
        with pytest.raises(DataError, match=path):
            rows.read([path])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def tasks(*_): return 1 / 0", "ZeroDivisionError"),
        ("def tasks(*_): return [1]", "TypeError"),
        ("def tasks(*_): return [{'task': {}}]", "KeyError"),
        ("def tasks(*_): return []", "no tasks"),
        ("import no_such_module", "no_such_module"),
        ("def", "SyntaxError"),
    ],
)
def test_tasks_that_are_none_are_refused_with_the_reason(
    tmp_path: Path, source: str, error: str
) -> None:
    with pytest.raises(DovetailError, match=error):
        tasks_of(program(tmp_path / "x.py", source))


def test_a_file_that_is_missing_and_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        tasks_of(ProgramEnvironmentConfig(name="program", file="nowhere.py"))
    for given in ({}, {"file": "x.py", "command": "x"}):
        with pytest.raises(ValueError, match="exactly one"):
            ProgramEnvironmentConfig(name="program", **given)


def test_a_config_without_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="`environments` is empty"):
        EnvironmentsConfig(name="environments")


def test_a_broken_environment_in_process_is_named_by_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Own, "found", "raises")
    monkeypatch.setattr(
        "dovetail_environments.rows.made", lambda *_: Own(EnvironmentSection(), PluginContext())
    )
    with pytest.raises(PluginBrokenError, match=r"'it'.*ZeroDivisionError"):
        tasks_of(EnvironmentSection(name="own"))


def test_the_reward_is_what_the_environment_scored_with_its_parts_by_environment() -> None:
    reward = EnvironmentReward(EnvironmentReward.Config(name="environment"), PluginContext())
    output = {"environment": "sums", "reward": 0.5, "parts": {"form": 1.0}}
    assert reward.compute_score(None, "", None, trajectory={"output": output}) == {
        "score": 0.5,
        "sums/reward": 0.5,
        "sums/form": 1.0,
    }
    for trajectory in (None, {"output": None}, {"output": {"reward": 1.0}}):
        with pytest.raises(ValueError, match="environments"):
            reward.compute_score(None, "", None, trajectory=trajectory)


@pytest.mark.proofs
@pytest.mark.skipif(UV is None, reason="uv is not installed here; `make proofs` has it")
def test_the_interpreter_may_be_one_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # else uv uses this folder's virtual environment
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    source = f"import cowsay\n{GOOD}"
    python = f"{UV} run --no-project --with cowsay python"
    with_uv = program(tmp_path / "uv.py", source, python=python, start_seconds=600.0)
    assert [row["extra_info"]["task"] for row in tasks_of(attrs.evolve(with_uv, tasks=2))] == [
        {"n": 0},
        {"n": 1},
    ]
    assert [reward_of(sample) for sample in drawn({"it": with_uv}, ["it"] * 3)] == [1.0] * 3
    without = program(tmp_path / "uv.py", source, python=f"{UV} run --no-project python")
    with pytest.raises(EnvironmentProcessError, match="cowsay"):
        tasks_of(without)
    missing = attrs.evolve(
        with_uv, python=f"{UV} run --no-project --with no-such-package-of-ours==1 python"
    )
    with pytest.raises(EnvironmentProcessError, match="no-such-package-of-ours"):
        tasks_of(missing)


def test_the_interpreter_may_be_a_command() -> None:
    config = ProgramEnvironmentConfig(
        name="program", file=__file__, python="uv run --with x python"
    )
    words = ProgramEnvironment(config, PluginContext()).words()
    assert list(words[:5]) == ["uv", "run", "--with", "x", "python"]
    command = WorkerCommand(title="it", words=words, requires=["x>=1"], log=Path("log"))
    assert (
        command.install()
        == "add the packages to the environment's `python`: uv run --with 'x>=1' python"
    )
