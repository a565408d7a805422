"""A run on Ray whose driver, rank, replica or raylet is killed goes on with the same command, and ends as one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kills import left_by, prompts_used

VICTIMS = {
    "driver": "dovetail",
    "rank": "ray::",
    "raylet": "raylet/raylet",
}
EPOCHS = 8
SITTINGS = 2
"""How often each victim is killed in one run."""


@pytest.fixture
def command(config: Path) -> list[str]:
    """A run of 24 steps on two ranks, without its name."""
    return [
        *(sys.executable, "-m", "dovetail", "train", str(config), "runtime.name=ray"),
        *("runtime.workers_per_node=2", f"trainer.total_epochs={EPOCHS}", "data.val_files=[]"),
        *("trainer.samples_per_step=-1", "tracking=[jsonl]"),
    ]


def sitting(command: list[str], run: Path, victim: str, step: int) -> bool:
    """Run the command, and kill the victim once a step's metrics are there; whether the run was finished all the same."""
    output = run.with_suffix(f".{step}.txt")
    with output.open("w") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert driver.poll() is None, output.read_text()
        time.sleep(0.01)
    started = psutil.Process(driver.pid).children(recursive=True)
    # Ray's own agents look only now and then whether their raylet is alive.
    started = [process for process in started if "Agent" not in " ".join(process.cmdline())]
    victims = list(_found(started, VICTIMS[victim])) if victim != "driver" else []
    os.kill(victims[0].pid if victims else driver.pid, signal.SIGKILL)
    assert bool(victims) == (victim != "driver")
    code = driver.wait(300)
    assert code >= 0 or victim == "driver", output.read_text()
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == [], f"of a run whose {victim} was killed"
    return code == 0


def _found(processes: list[psutil.Process], command: str) -> Iterator[psutil.Process]:
    for process in processes:
        line = " ".join(process.cmdline())
        if command in line.split(" ")[0] and "IDLE" not in line:
            yield process


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_on_ray_that_is_killed_ends_as_one_that_was_not(
    command: list[str], config: Path
) -> None:
    runs = config.parent / "runs" / "tests"
    subprocess.run([*command, "experiment=undisturbed"], check=True)
    expected = left_by(runs / "undisturbed")
    for victim in VICTIMS:
        run, again = runs / victim, [*command, f"experiment={victim}"]
        for number in range(SITTINGS):
            if sitting(again, run, victim, 8 * number + 1):
                break  # its steps may be over before the loss of a raylet is noticed
        subprocess.run(again, check=True)
        found = left_by(run)
        names = expected.keys() | found.keys()
        assert sorted(name for name in names if expected.get(name) != found.get(name)) == []
        assert set(prompts_used(run).values()) == {1}
        assert len(prompts_used(run)) == 12 * EPOCHS
