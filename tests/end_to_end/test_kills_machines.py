"""A supervised run over two Ray nodes, whose ranks, replicas, raylets and driver are killed, ends by itself as one that was not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from kills import left_by, prompts_used
from run_files import lines_of, steps_of

TITLES = {"rank": "HostProcess", "replica": "ReplicaProcess"}
KILLS = {"rank": 3, "replica": 3, "raylet": 2, "driver": 2}
EPOCHS = 6
WAIT = 900.0
"""Seconds in which a run must take its next step, or start again."""
STARTS = 4
"""Tries to start a Ray node."""


class Machines:
    """Two Ray nodes on this machine; one whose raylet is killed has another in its place."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes = [self._added() for _ in range(2)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def workers(self, title: str) -> list[psutil.Process]:
        """Return the processes of workers whose title Ray has made from such a class."""
        found = []
        for node in self._nodes:
            for child in _below(_raylet(node).pid):
                try:
                    line = " ".join(child.cmdline())
                except psutil.Error:
                    continue
                if line.startswith(f"ray::{title}"):
                    found.append(child)
        return sorted(found, key=lambda process: process.pid)

    def kill_raylet(self, number: int) -> None:
        """Kill the raylet of a node, and let another node join."""
        raylet = _raylet(self._nodes[number])
        raylet.kill()
        raylet.wait()
        self._nodes[number] = self._added()

    def close(self) -> None:
        self._cluster.shutdown()

    def _added(self) -> Any:
        for _ in range(STARTS - 1):
            with suppress(Exception):  # Ray gives a node 30 s, which a busy machine may exceed
                return self._cluster.add_node(num_cpus=1, include_dashboard=False)
        return self._cluster.add_node(num_cpus=1, include_dashboard=False)


def _raylet(node: Any) -> subprocess.Popen[bytes]:
    (started,) = node.all_processes["raylet"]
    process: subprocess.Popen[bytes] = started.process
    return process


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class Supervised:
    """A run below its supervisor."""

    def __init__(self, command: list[str], run: Path, output: Path) -> None:
        self.run, self.output = run, output
        with output.open("w") as file:
            self.supervisor = subprocess.Popen(command, stdout=file, stderr=file)

    @property
    def step(self) -> int:
        """The last step whose metrics are there."""
        return max((int(row["step"]) for row in steps_of(self.run)), default=0)

    @property
    def driver(self) -> psutil.Process | None:
        """The process that trains now."""
        try:
            process = psutil.Process(json.loads((self.run / "run.json").read_text())["process"])
            (above,) = [p for p in [process.parent()] if p is not None]
            return process if above.pid == self.supervisor.pid else None
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            return None

    def started_after(self, before: psutil.Process) -> bool:
        """Whether another process than that before trains now."""
        return self.driver not in (None, before)

    def has_passed(self, step: int, ended: psutil.Process | None) -> bool:
        """Whether a process other than `ended` trains, and has done a step after this one and after those that it started with."""
        driver, metrics = self.driver, self.run / "metrics.jsonl"
        # A run that a kill ends may log one more step.
        if driver in (None, ended) or not metrics.exists():
            return False
        # Until it has read its checkpoint, rows of steps that it is to repeat are still there.
        if metrics.stat().st_mtime < driver.create_time():
            return False
        restarts = self.run / "restarts.jsonl"
        begun = [int(row["from_step"]) for row in lines_of(restarts)] if restarts.exists() else []
        return self.step > max([step, *begun[-1:]])

    def kill(self, victim: str, machines: Machines, chance: random.Random) -> None:
        """Kill one of such processes, as soon as there is one."""
        if victim == "raylet":
            machines.kill_raylet(chance.randrange(2))
        elif victim == "driver":
            self.until(lambda: self.driver).kill()
        else:
            chance.choice(self.until(lambda: machines.workers(TITLES[victim]))).kill()

    def close(self) -> None:
        """Kill what is left of the run and its supervisor."""
        for process in [*_below(self.supervisor.pid), self.supervisor]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.supervisor.wait()

    def until(self, met: Callable[[], Any]) -> Any:
        """Wait for a condition, and return what it gave."""
        end = time.monotonic() + WAIT
        while not (found := met()):
            assert self.supervisor.poll() is None, self.output.read_text()[-6000:]
            assert time.monotonic() < end, self.output.read_text()[-6000:]
            time.sleep(0.02)
        return found


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    # Ray lowers the priority of its workers, which are the run here.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    started = Machines()
    yield started
    started.close()


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_supervised_run_on_two_machines_that_is_killed_ten_times_ends_as_one_that_was_not(
    config: Path, machines: Machines, record_property: Callable[[str, object], None]
) -> None:
    """Kills come while the run starts, generates, trains and saves: a random time after its start, or after a new step.

    `DOVETAIL_KILLS=2` is another seed of what is killed when.
    """
    runs = config.parent / "runs" / "tests"
    command = [
        *(sys.executable, "-m", "dovetail", "train", str(config), "runtime.name=ray"),
        *("runtime.nodes=2", "runtime.cpus_per_worker=1", f"runtime.address={machines.address}"),
        *(f"trainer.total_epochs={EPOCHS}", "trainer.save_every=2", "trainer.run_restarts=20"),
        *("data.val_files=[]", "trainer.samples_per_step=-1", "tracking=[jsonl]"),
    ]
    began = time.monotonic()
    subprocess.run([*command, "experiment=undisturbed"], check=True)
    steps = [float(row["time/step"]) for row in steps_of(runs / "undisturbed")]
    start = time.monotonic() - began - sum(steps)
    chance = random.Random(os.environ.get("DOVETAIL_KILLS", "1"))
    victims = [victim for victim, count in KILLS.items() for _ in range(count)]
    chance.shuffle(victims)
    run = Supervised([*command, "experiment=killed"], runs / "killed", config.parent / "killed.txt")
    with closing(run):
        before, ended, at_start = None, None, False
        reached = 0
        for victim in victims:
            # Two starts in a row that are cut short end a run: see docs/long-runs.md.
            at_start = before is not None and not at_start and chance.random() < 0.5
            if at_start:
                run.until(partial(run.started_after, before))
                time.sleep(chance.uniform(0, start))
            else:
                run.until(partial(run.has_passed, reached, ended))
                time.sleep(chance.uniform(0, max(steps)))
            before, reached = run.driver, run.step
            # A killed replica is restarted, without ending the run.
            ended = before if victim != "replica" else None
            run.kill(victim, machines, chance)
            # The node of a raylet may cut the next start short by itself.
            if victim in ("replica", "raylet"):
                before = None
        assert run.supervisor.wait(2 * WAIT) == 0, run.output.read_text()[-6000:]
    expected, found = left_by(runs / "undisturbed"), left_by(run.run)
    names = expected.keys() | found.keys()
    assert sorted(name for name in names if expected.get(name) != found.get(name)) == []
    assert set(prompts_used(run.run).values()) == {1}
    restarts = lines_of(run.run / "restarts.jsonl")
    assert len(restarts) >= sum(KILLS.values()) - KILLS["replica"] - 1
    record_property("restarts", len(restarts))
