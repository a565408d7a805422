"""A tiny model, a dataset and a config, and a way to run the command on them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from click.testing import CliRunner, Result
from hatchling.builders.wheel import WheelBuilder

from dovetail.cli.main import main
from dovetail.run.run import train
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def install_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Build the wheel of a package, and install it into a folder of its own."""

    def install(source: Path) -> Path:
        name = source.name
        home = tmp_path_factory.mktemp(name)
        package, site = home / name, home / "site"
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        manifest = ("dovetail_sdk", "manifest", ".")
        subprocess.run([sys.executable, "-m", *manifest], cwd=package, check=True)
        [wheel] = WheelBuilder(str(package)).build(directory=str(home), versions=["standard"])
        quiet = (
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-compile",
            "--disable-pip-version-check",
        )
        pip = ("pip", "install", *quiet, "--target", str(site), wheel)
        subprocess.run([sys.executable, "-m", *pip], check=True)
        return site

    return install


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


@pytest.fixture(scope="session")
def tiny_with_tools(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that describes tools."""
    folder = tmp_path_factory.mktemp("with_tools") / "model"
    shutil.copytree(tiny, folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A config that trains the tiny model for three steps on a reward from a file."""
    return _config(tiny, tmp_path)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their report, as they do outside of tests."""
    monkeypatch.delenv("DOVETAIL_SKIP_OBSERVERS")


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `config` that has ended; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    return Path(train(_config(tiny, folder))["directory"])


def _config(tiny: Path, folder: Path) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a in range(4)
        for b in range(4)
    ]
    for name, part in (("train", rows[:12]), ("val", rows[12:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isalpha() for c in solution_str) / 50\n"
    )
    document = {
        "seed": 3,
        "project": "tests",
        "experiment": "run",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "val.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 12,
        },
        "rollout": {"name": "hf", "n": 4},
        "actor": {"optim": {"lr": 1e-2}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(folder / "my_reward.py")}},
        "trainer": {"total_epochs": 1, "save_every": 1},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def tool_loop(tmp_path: Path) -> str:
    """A tool_agent with a calculator, as an override: it finds the same call in every turn, whatever the policy wrote."""
    (tmp_path / "parser.py").write_text(
        "from dovetail.interfaces import ParsedTurn, ToolCall, ToolParser\n\n\n"
        "class EveryTurn(ToolParser):\n"
        '    """Finds the same call in every turn."""\n\n'
        '    name = "every_turn"\n'
        '    api = ">=1.0,<2"\n\n'
        "    def parse(self, text, tools):\n"
        '        call = ToolCall(id="call_0", name="calculator", arguments={"expression": "6*7"})\n'
        '        return ParsedTurn(content="", calls=(call,))\n'
    )
    parser = json.dumps({"path": str(tmp_path / "parser.py"), "attribute": "EveryTurn"})
    return f"{{name: tool_agent, tools: [calculator], parser: {parser}, max_turn_tokens: 6, max_turns: 2}}"


@pytest.fixture
def planned() -> Callable[..., str]:
    """What `dovetail plan` prints, run in this process: the import of torch is most of a process of its own."""

    def plan(*args: str) -> str:
        done = CliRunner().invoke(main, ["plan", *args])
        assert done.exit_code == 0, done.output
        return done.stdout

    return plan


@pytest.fixture
def inside() -> Callable[..., Result]:
    """Run the command line in this process, which has imported torch."""

    def run(*args: str, check: bool = True) -> Result:
        done = CliRunner().invoke(main, args)
        if check:
            assert done.exit_code == 0, done.output
        return done

    return run


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every move of a model, as (role, where to).

    An engine on the CPU has nowhere to go. Here it goes in name, so that it refuses to compute while it is away, as
    it does on an accelerator.
    """
    from dovetail_train_fsdp2.engine import Fsdp2Engine

    seen: list[tuple[str, str]] = []

    def move(self: Any, device: Any, *, offloaded: bool) -> None:
        seen.append((self.context.role, "away" if offloaded else "back"))
        self._offloaded = offloaded

    monkeypatch.setattr(Fsdp2Engine, "_move", move)
    return seen


class Command:
    """A `dovetail` command in a process of its own."""

    def __init__(
        self,
        server: subprocess.Popen[str],
        args: tuple[str, ...],
        folder: Path,
        kill: tuple[str, int, str] | None = None,
    ) -> None:
        self._server, self._args = server, args
        self._output = folder / f"command-{uuid4().hex[:8]}"
        for end in (".out", ".err"):
            self._output.with_suffix(end).touch()
        order = {"args": args, "cwd": str(folder), "env": dict(os.environ)}
        if kill is not None:
            order["kill"] = kill
        self.pid = self._asked({**order, "output": str(self._output)})
        self._code: int | None = None

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended; its exit code is negative where a signal ended it."""
        if self._code is None:
            self._code = self._asked({"wait": self.pid})
        printed = [self._output.with_suffix(end).read_text() for end in (".out", ".err")]
        return subprocess.CompletedProcess(self._args, self._code, *printed)

    @property
    def ended(self) -> bool:
        """Whether it has ended, waited for or not."""
        if self._code is not None:
            return True
        state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "Z"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if not self.ended:
            os.kill(self.pid, number)

    def _asked(self, order: Mapping[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@pytest.fixture(scope="session")
def command_server() -> Iterator[subprocess.Popen[str]]:
    """See `command_server.py`."""
    file = Path(__file__).with_name("command_server.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(file)], text=True, **pipes) as server:  # type: ignore[call-overload]
        yield server


@pytest.fixture
def start(
    command_server: subprocess.Popen[str], tmp_path: Path
) -> Iterator[Callable[..., Command]]:
    """Start the command line in a process of its own, to be killed at a point where one is given (see `command_server.py`);
    one that a test leaves behind is killed.
    """
    with ExitStack() as left:

        def begin(*args: str, kill: tuple[str, int, str] | None = None) -> Command:
            command = Command(command_server, args, tmp_path, kill)
            left.callback(command.wait)
            left.callback(command.send, signal.SIGKILL)
            return command

        yield begin


@pytest.fixture
def dovetail(start: Callable[..., Command]) -> Run:
    """Run the command line in a process of its own."""

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = start(*args).wait()
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
