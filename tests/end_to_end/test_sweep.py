"""`dovetail sweep`: a run for each combination of values, checked first, resumable, stopped by a signal."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

SHORT = ("trainer.total_steps=1", "data.val_files=[]", "trainer.save_every=0")


def states(folder: Path, inside: Callable[..., Result]) -> dict[str, str]:
    """Each run's state by its name."""
    rows = json.loads(inside("runs", "list", str(folder), "--json").stdout)
    return {Path(row["path"]).name: row["state"] for row in rows}


def test_a_failed_run_does_not_end_the_others_and_the_same_command_runs_it_again(
    config: Path, tmp_path: Path, dovetail: Callable[..., Any], inside: Callable[..., Result]
) -> None:
    bad = (
        (tmp_path / "my_reward.py")
        .read_text()
        .replace(
            "    return", "    assert __import__('pathlib').Path('repaired').exists()\n    return"
        )
    )
    (tmp_path / "bad.py").write_text(bad)
    command = ("sweep", str(config), *SHORT, "reward.function.path=bad.py,my_reward.py")
    runs = tmp_path / "runs"
    done = dovetail(*command, "trainer.seed_is_no_key=1", check=False)
    assert done.returncode == 2
    assert "seed_is_no_key" in done.stderr
    assert not runs.exists()

    done = dovetail(*command, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    ends = states(runs, inside)
    assert ends == {"run_path=bad.py": "failed", "run_path=my_reward.py": "completed"}
    table = done.stdout[done.stdout.rindex("\nRUN ") :].splitlines()[2:4]
    assert [row.split()[0].rpartition("/")[2] for row in table] == sorted(ends)
    kept = (runs / "tests" / "run_path=my_reward.py" / "events.jsonl").read_bytes()

    (tmp_path / "repaired").touch()
    done = dovetail(*command)
    assert set(states(runs, inside).values()) == {"completed"}
    assert (runs / "tests" / "run_path=my_reward.py" / "events.jsonl").read_bytes() == kept


@pytest.mark.parametrize(
    ("swept", "named"),
    [
        (("seed=1,2", "actor.optim.lrr=1e-6,3e-6"), "actor.optim.lrr"),
        (("seed=1,two",), "two"),
        (("data.train_files=absent.jsonl,other.jsonl",), "other.jsonl"),
        (("seed=1,1",), "seed=1,1"),
        (("seed=1,2", "seed=3,4"), "seed=3,4"),
        (("seed=1,2", "trainer.total_steps"), "trainer.total_steps"),
        (("experiment=a,b",), "experiment"),
        (("seed=1,2", "data.train_files=[a,b"), "[a,b"),
        (("model.path=a/b,a-b",), "run_path=a-b"),
        ((), "dovetail train"),
        (("seed=3",), "dovetail train"),
    ],
)
def test_a_bad_sweep_is_named_and_starts_nothing(
    config: Path,
    tmp_path: Path,
    inside: Callable[..., Result],
    swept: tuple[str, ...],
    named: str,
) -> None:
    done = inside("sweep", str(config), *SHORT, *swept, check=False)
    assert done.exit_code == 2
    assert named in done.stderr
    assert not (tmp_path / "runs").exists()


def test_values_keep_their_form_and_name_the_runs(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    """A list, quotes and two keys that end alike; the data of all is missing, so that nothing starts."""
    swept = (
        "data.train_files=[a, b.jsonl],c.jsonl",
        "critic.optim.lr=1e-5,1e-4",
        "actor.optim.lr=1e-6,1e-7",
        "project='x,y',z",
    )
    done = inside("sweep", str(config), *swept, "seed=1", check=False)
    for name in (
        "train_files=a-b.jsonl",
        "critic.optim.lr=1e-5",
        "actor.optim.lr=1e-6",
        "project=x-y",
    ):
        assert name in done.stderr
    assert '"b.jsonl"' in done.stderr


def test_ctrl_c_saves_the_run_under_way_and_ends_the_sweep(
    config: Path, tmp_path: Path, start: Callable[..., Any], inside: Callable[..., Result]
) -> None:
    with (tmp_path / "my_reward.py").open("a") as file:
        # The second step, whose samples come after 16 others, takes long.
        file.write(
            "import itertools, time\n_score, _calls = compute_score, itertools.count(1)\n"
            "def compute_score(*a, **k):\n"
            "    time.sleep(0 if next(_calls) <= 16 else 60)\n"
            "    return _score(*a, **k)\n"
        )
    quiet = ("data.val_files=[]", "reward.timeout=300")
    sweep = start("sweep", str(config), *quiet, "seed=1,2")
    first = tmp_path / "runs" / "tests" / "run_seed=1"
    while not (first / "checkpoints" / "step_1").exists():
        assert not sweep.ended, sweep.wait()
        time.sleep(0.05)
    sweep.send(signal.SIGINT)
    done = sweep.wait()
    assert done.returncode == 128 + signal.SIGINT, done.stdout + done.stderr
    assert states(tmp_path / "runs", inside) == {"run_seed=1": "stopped"}
    assert "not started" in done.stdout
