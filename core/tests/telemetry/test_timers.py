"""Phases add up, nest, and are timed although they raise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.telemetry.timers import Timers


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_add_up_and_nest():
    clock = Clock()
    timers = Timers(clock=clock)
    for _ in range(2):
        with timers("rollout"):
            clock.now += 1.0
            with timers("rollout/scoring"):
                clock.now += 0.25
    with timers("update"):
        clock.now += 3.0
    assert timers.metrics() == {
        "time/rollout/scoring": 0.5,
        "time/rollout": 2.5,
        "time/update": 3.0,
    }
    assert timers.seconds("update") == 3.0
    assert timers.seconds("never") == 0.0


def test_a_phase_inside_itself_is_counted_once():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("forward"), timers("forward"):
        clock.now += 2.0
    assert timers.metrics() == {"time/forward": 2.0}


def test_a_phase_that_raises_is_timed():
    clock = Clock()
    timers = Timers(clock=clock)

    def interrupted():
        with timers("update"):
            clock.now += 2.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert timers.metrics() == {"time/update": 2.0}


def test_reset_begins_a_new_step():
    timers = Timers()
    with timers("rollout"), timers("rollout/scoring"):
        pass
    timers.reset()
    assert timers.metrics() == {}


def test_the_face_of_telemetry_imports_nothing_heavy():
    script = (
        "import sys\n"
        "import dovetail.telemetry as telemetry\n"
        "telemetry.RunDirectory, telemetry.numbers, telemetry.read_rows\n"
        "heavy = {'torch', 'transformers', 'numpy', 'structlog', 'rich', 'jinja2'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
