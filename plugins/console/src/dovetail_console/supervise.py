"""The supervisor of a run: restarts the run from its last checkpoint if the infrastructure failed (`trainer.run_restarts`)."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dovetail.checkpoint import CheckpointStore
from dovetail.cli import render
from dovetail.errors import RunDirectoryError
from dovetail.hooks import Observers
from dovetail.interfaces import HookSpec, PluginContext
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import RunConfig
from dovetail.telemetry import RunDirectory, append_rows, read_rows, step_of
from dovetail_console.child_process import ChildProcess
from dovetail_console.run_overview import read_or_none

FIRST_PAUSE = 10.0
"""Seconds before the first restart. Each restart that brings no new step makes the next pause four times as long."""
IN_VAIN = 2
"""Number of consecutive restarts without a new step after which the supervisor ends."""


def supervise(
    config: RunConfig,
    path: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    cause: Path,
) -> None:
    """Train in a separate process, and start it again from the last checkpoint after a failure of the infrastructure.

    A failure of the infrastructure is exit code 75 or death by a signal, except for signals that stop a run cleanly. Once a process has
    trained, exit code 2 counts too, and so does exit code 1 without an error that gives the cause.

    Args:
        config: the config of the run.
        path: the run directory.
        arguments: the arguments of the command `dovetail`, such as `["train", "config.yaml"]`.
        variables: environment variables that tell a process about its supervisor.
        cause: the file to which a process of the run writes the message of the error that ended it.

    Raises:
        click.exceptions.Exit: the run did not complete. The exit code is that of the run's last process.
    """
    attempts = _Attempts(path, variables, cause)
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
    """The processes of a run, one after the other, and their results."""

    def __init__(self, path: Path, variables: Mapping[str, str], cause: Path) -> None:
        self._path, self._variables, self._cause_file = path, variables, cause
        self._directory = RunDirectory(path)
        self._trained = False
        self._highest = self._reached()
        self.in_vain = -1
        """Number of restarts in a row without a new step; −1 before the first process."""
        self._cause = ""
        self._told = ""
        self._code = 0

    def run(self, child: ChildProcess, command: Sequence[str]) -> int:
        """Start a process of the run, wait for its end, and return its exit code."""
        self._cause_file.write_text("")
        code = self._code = child.call(command, {**os.environ, **self._variables})
        reached = self._reached()
        progress = reached > self._highest
        self._trained |= progress
        self._highest = max(reached, self._highest)
        self.in_vain = 0 if progress else self.in_vain + 1
        self._told = self._cause_file.read_text(encoding="utf-8")
        self._cause = self._told or (_signal(-code) if code < 0 else f"exit code {code}")
        return code

    def may_work_again(self, code: int) -> bool:
        """Return whether an exit code may be caused by the infrastructure."""
        if code == 2:
            return self._trained
        if code == 1:  # Ray ends a process like this if its raylet is lost
            return self._trained and not self._told
        return code == os.EX_TEMPFAIL or (code < 0 and -code not in (signal.SIGINT, signal.SIGTERM))

    def why_not_again(self, done: int, most: int) -> str:
        """Return why the run is not restarted again; empty if it is.

        Args:
            done: the number of restarts so far.
            most: the maximum number of restarts.
        """
        if self.in_vain >= IN_VAIN:
            return f"{IN_VAIN} restarts in a row completed no new step; last cause: {self._cause}"
        if done >= most:
            return f"trainer.run_restarts = {most} allows no further restart; last cause: {self._cause}"
        return ""

    def announce(self, number: int, most: int, seconds: float) -> None:
        """Print that the run will be restarted, and record the restart in the run directory, if there is one.

        Args:
            number: the number of the restart, from 1.
            most: the maximum number of restarts.
            seconds: the pause before the restart.
        """
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
            append_rows(self._directory.restarts, [row])
        start = f"step {step}" if step else "the beginning"
        render.line(
            f"restart {number} of at most {most} in {seconds:g} s, from {start}, repeating {row['repeated']} steps: {self._cause}",
            err=True,
        )

    def give_up(self, config: RunConfig) -> None:
        """Call the hook `given_up` of observers and trackers, which are made anew, since those of the run's process are gone."""
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
                total_steps=read_or_none(
                    lambda: self._directory.read_json("summary.json")["total_steps"]
                ),
                cause=self._cause,
            )

    def check_free(self) -> None:
        """Check that no other process has continued the run meanwhile.

        Raises:
            RunDirectoryError: another process has continued it.
        """
        if RunDirectory.begun(self._path) and self._directory.under_way:
            raise RunDirectoryError(
                f"the run in {str(self._path)!r} can't be restarted: another process has already continued it",
                hint="let the other process finish the run",
            )

    def _reached(self) -> int:
        """Return the last step that any process of the run logged or saved."""
        logged = (step_of(row) for row in read_rows(self._directory.metrics))
        steps = [int(step) for step in logged if math.isfinite(step)]
        saved = CheckpointStore(self._directory.checkpoints).saved()
        return max([0, *steps, *(int(path.name.removeprefix("step_")) for path in saved)])


def _signal(number: int) -> str:
    return f"killed by {signal.Signals(number).name}"
