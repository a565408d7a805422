"""A tiny model, a dataset and a config, and a way to run the command on them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dovetail.cli.main import main
from dovetail_sdk.testing import tiny_model_and_tokenizer

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def install_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Build the wheel of a package, and install it into a folder of its own."""

    def install(source: Path) -> Path:
        name = source.name
        home = tmp_path_factory.mktemp(name)
        package, site = home / name, home / "site"
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        quiet = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
        for command in (
            ("dovetail_sdk", "manifest", "."),
            ("pip", "wheel", *quiet, "--no-build-isolation", "--wheel-dir", str(home), "."),
            ("pip", "install", *quiet, "--target", str(site), str(home / f"{name}-0.1.0-py3-none-any.whl")),
        ):  # fmt: skip
            subprocess.run([sys.executable, "-m", *command], cwd=package, check=True)
        return site

    return install


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A config that trains the tiny model for three steps on a reward from a file."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a in range(4)
        for b in range(4)
    ]
    for name, part in (("train", rows[:12]), ("val", rows[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isalpha() for c in solution_str) / 50\n"
    )
    document = {
        "seed": 3,
        "project": "tests",
        "experiment": "run",
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "val_files": [str(tmp_path / "val.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 12,
        },
        "rollout": {"name": "hf", "n": 4},
        "actor": {"optim": {"lr": 1e-2}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(tmp_path / "my_reward.py")}},
        "trainer": {"total_epochs": 1, "save_every": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


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
def dovetail(tmp_path: Path) -> Run:
    """Run the command line in a process of its own."""

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dovetail.cli.main", *args],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
            timeout=800,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
