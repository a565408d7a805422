"""The supervisor of a run: it starts the run again from its last checkpoint where the infrastructure failed (`trainer.run_restarts`)."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli import render
from dovetail.cli.child_process import ChildProcess
from dovetail.errors import RunDirectoryError
from dovetail.hooks import Observers
from dovetail.interfaces.hooks import HookSpec
from dovetail.interfaces.plugin import PluginContext
from dovetail.plugins.load import make_plugin, ref_for
from dovetail.run.requeue import summary_of
from dovetail.sections import RunConfig
from dovetail.telemetry.jsonl import append_rows, read_rows, step_of
from dovetail.telemetry.run_directory import RESTARTS, RunDirectory

VARIABLE = "DOVETAIL_SUPERVISED"
"""Environment variable of a run's own process: the run directory that a supervisor above it watches."""
CAUSE = "DOVETAIL_SUPERVISED_CAUSE"
"""Environment variable of a run's own process: the file into which it writes why it fails."""
FIRST_PAUSE = 10.0
"""Seconds before a restart; four times as many after each restart that brought no new step."""
IN_VAIN = 2
"""Restarts in a row without a new step, after which the supervisor ends."""


def is_supervised(path: Path) -> bool:
    """Return whether a supervisor above this process watches the run in a directory: one is enough."""
    return os.environ.get(VARIABLE) == str(path.absolute())


@contextmanager
def cause_kept() -> Iterator[None]:
    """Write the error that ends this process's run where its supervisor reads it; also one before the run's first step, of which no summary tells."""
    try:
        yield
    except Exception as error:
        if file := os.environ.get(CAUSE):
            with suppress(OSError):
                text = str(error).partition("\n")[0][:500] or type(error).__name__
                Path(file).write_text(text, encoding="utf-8")
        raise


def supervise(config: RunConfig, path: Path, arguments: Sequence[str]) -> None:
    """Train in a process of its own, and again from the last checkpoint after a failure of the infrastructure.

    Such are exit code 75, a death by a signal that stops no run cleanly, and, of a command that has trained before, exit code 2:
    what it asks for is no longer there, or exit code 1 without an error that says why.

    Args:
        config: of the run.
        path: the run directory.
        arguments: of the command `dovetail`, such as `["train", "config.yaml"]`.

    Raises:
        click.exceptions.Exit: the run did not complete; with the exit code of its last process.
    """
    with TemporaryDirectory(prefix="dovetail-") as folder:
        _supervise(config, _Attempts(path, Path(folder) / "cause"), arguments)


def _supervise(config: RunConfig, attempts: _Attempts, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-P", "-m", "dovetail", *arguments]
    continuing = [] if config.trainer.resume != "never" else ["trainer.resume=auto"]
    most, done = config.trainer.run_restarts, 0
    child = ChildProcess()
    with child:
        while True:
            code = attempts.run(child, command)
            if child.received is not None or not attempts.may_work_again(code):
                break
            why_not = attempts.why_not_again(done, most)
            if why_not:
                render.line(f"not started again: {why_not}", err=True)
                attempts.give_up(config)
                break
            done += 1
            seconds = FIRST_PAUSE * 4**attempts.in_vain
            attempts.announce(done, most, seconds)
            if child.pause(seconds):
                break
            attempts.check_free()
            command, continuing = [*command, *continuing], []
    if code and child.received is not None:
        code = 128 + child.received
    if code:
        raise click.exceptions.Exit(code if code > 0 else 128 - code)


class _Attempts:
    """What the processes of a run came to."""

    def __init__(self, path: Path, cause: Path) -> None:
        self._path, self._cause_file = path, cause
        self._directory = RunDirectory(path)
        self._trained = False
        self._highest = self._reached()
        self.in_vain = -1
        """Restarts in a row without a new step; -1 before the first."""
        self._cause = ""
        self._told = ""
        self._code = 0

    def run(self, child: ChildProcess, command: Sequence[str]) -> int:
        """Start a process of the run, wait for its end, and return its exit code."""
        names = {VARIABLE: str(self._path.absolute()), CAUSE: str(self._cause_file)}
        self._cause_file.write_text("")
        code = self._code = child.call(command, {**os.environ, **names})
        reached = self._reached()
        progress = reached > self._highest
        self._trained |= progress
        self._highest = max(reached, self._highest)
        self.in_vain = 0 if progress else self.in_vain + 1
        self._told = self._cause_file.read_text(encoding="utf-8")
        self._cause = self._told or (_signal(-code) if code < 0 else f"exit code {code}")
        return code

    def may_work_again(self, code: int) -> bool:
        """Whether the infrastructure is to blame for an exit code."""
        if code == 2:
            return self._trained
        if code == 1:  # Ray ends a process so whose own raylet is lost
            return self._trained and not self._told
        return code == os.EX_TEMPFAIL or (code < 0 and -code not in (signal.SIGINT, signal.SIGTERM))

    def why_not_again(self, done: int, most: int) -> str:
        """Return why there is no further restart; empty where there is one."""
        if self.in_vain >= IN_VAIN:
            return f"{IN_VAIN} restarts in a row brought no new step; last cause: {self._cause}"
        if done >= most:
            return f"trainer.run_restarts allows {most}; last cause: {self._cause}"
        return ""

    def announce(self, number: int, most: int, seconds: float) -> None:
        """Say that the run is started again, and write it to the run directory, where there is one."""
        latest = CheckpointStore(self._directory.checkpoints).latest()
        step = int(latest.name.removeprefix("step_")) if latest else 0
        reached = self._reached()
        row: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "cause": self._cause,
            "exit_code": self._code if self._code > 0 else 128 - self._code,
            "step": reached,
            "from_step": step,
            "repeated": max(0, reached - step),
        }
        if RunDirectory.begun(self._path):
            append_rows(self._path / RESTARTS, [row])
        start = f"step {step}" if step else "the beginning"
        render.line(
            f"restart {number} of at most {most} in {seconds:g} s, from {start}, repeating {row['repeated']} steps: {self._cause}",
            err=True,
        )

    def give_up(self, config: RunConfig) -> None:
        """Call the hook `given_up` of observers, and of the run's trackers that have it; those of the run's process are gone."""
        observers = Observers()
        hooks = observers.hook
        observers.load()
        context = PluginContext(seed=config.seed, run_directory=self._path)
        with ExitStack() as started:
            for section in config.tracking:
                tracker: Any = make_plugin(ref_for("tracker", section), context)
                if type(tracker).given_up is not HookSpec.given_up:
                    name = observers.add(tracker, f"{tracker.name} (tracker)")
                    started.callback(observers.guarded(name, "close", tracker.close))
                    observers.guarded(name, "start", tracker.start)()
            hooks.given_up(
                directory=self._path,
                step=self._reached(),
                total_steps=summary_of(self._directory).get("total_steps"),
                cause=self._cause,
            )

    def check_free(self) -> None:
        """Refuse to start a run again that another process has taken up meanwhile.

        Raises:
            RunDirectoryError: it has.
        """
        if RunDirectory.begun(self._path) and self._directory.under_way:
            raise RunDirectoryError(
                f"another process has continued the run in {str(self._path)!r} meanwhile",
                hint="one of them is enough: leave that one",
            )

    def _reached(self) -> int:
        """Return the last step that was logged or saved, of whatever process."""
        logged = (step_of(row) for row in read_rows(self._directory.metrics))
        steps = [int(step) for step in logged if math.isfinite(step)]
        saved = CheckpointStore(self._directory.checkpoints).saved()
        return max([0, *steps, *(int(path.name.removeprefix("step_")) for path in saved)])


def _signal(number: int) -> str:
    return f"killed by {signal.Signals(number).name}"
