"""BackgroundTracker: training never waits, a failing or hanging tracker stops nothing, and lost calls are counted."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import PluginNeedsError
from dovetail.hooks import Observers
from dovetail.interfaces import PluginContext
from dovetail_trackers.background import BackgroundTracker, TrackedRun
from dovetail_trackers.config import TrackerConfig


class ListTracker(BackgroundTracker):
    """A tracker that writes to a list, after an action that a test sets."""

    name = "list"
    module = "json"

    def __init__(self, before: Callable[[], None] = lambda: None, **settings: Any) -> None:
        config = TrackerConfig(name="list", **{"retry_seconds": 0.01, **settings})
        super().__init__(config, PluginContext(logger=logging.getLogger("test")))
        self.before, self.written = before, []
        self.opened: list[TrackedRun] = []
        self.status = ""

    def open_run(self, run: TrackedRun) -> str:
        self.before()
        self.opened.append(run)
        return run.run_id or "new"

    def write_metrics(self, step, metrics):
        self.before()
        self.written.append((step, dict(metrics)))

    def write_samples(self, step, rows):
        self.written.append((step, rows))

    def end_run(self, status):
        self.status = status


def begin(tracker: ListTracker, directory: Path, start_step: int = 0) -> ListTracker:
    """Start a run, and return the tracker."""
    directory.mkdir(parents=True, exist_ok=True)
    tracker.run_started(None, None, directory, start_step=start_step, total_steps=9)
    return tracker


def end(tracker: ListTracker, status: str = "completed") -> ListTracker:
    """End a run, and return the tracker."""
    tracker.run_finished({"status": status})
    tracker.close()
    return tracker


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"run_id": "old"}'])
def test_a_damaged_state_of_an_earlier_sitting_begins_a_new_run(tmp_path, caplog, content):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "list.json").write_text(content)
    tracker = begin(ListTracker(), tmp_path)
    tracker.metrics_logged(1, {"loss": 1.0})
    tracker.close()
    assert tracker.opened[0].run_id is None
    assert tracker.written == [(1, {"loss": 1.0})]
    assert "list.json is damaged" in caplog.text


def test_training_does_not_wait_for_a_tracker_that_blocks(tmp_path: Path) -> None:
    released = threading.Event()
    tracker = ListTracker(released.wait)
    observers = Observers()
    observers.add(tracker, "list (tracker)")
    hook = observers.hook
    hook.run_started(config=None, plan=None, directory=tmp_path, start_step=0, total_steps=9)
    for step in range(1, 100):
        hook.metrics_logged(step=step, metrics={"reward/mean": step / 2})
    # Training has finished all steps while the tracker is still in its first call.
    assert tracker.written == []
    released.set()
    end(tracker)
    assert tracker.written == [(step, {"reward/mean": step / 2}) for step in range(1, 100)]
    assert tracker.status == "completed"


def test_a_full_queue_drops_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()
    tracker = begin(ListTracker(released.wait, queue_size=2), tmp_path)
    for step in range(1, 6):
        tracker.metrics_logged(step, {"a": 1.0})
    released.set()
    end(tracker)
    assert [step for step, _ in tracker.written] == [1, 2]
    assert "written: 3 dropped because the queue was full (queue_size=2)" in caplog.text


def test_a_hanging_tracker_is_reported_and_holds_the_end_up_for_close_seconds_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forever = threading.Event()
    tracker = begin(ListTracker(forever.wait, close_seconds=0.2), tmp_path)
    time.sleep(0.05)
    for step in (1, 2, 3):
        tracker.metrics_logged(step, {"a": 1.0})
    assert caplog.text.count("log calls are waiting") == 1
    began = time.monotonic()
    end(tracker)
    assert time.monotonic() - began < 2
    assert "4 log" in caplog.text
    assert "end (close_seconds=0.2)" in caplog.text
    forever.set()


def test_a_failing_tracker_is_named_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("no network")] * 5

    def fail() -> None:
        if failures:
            raise failures.pop()

    tracker = begin(ListTracker(fail), tmp_path)
    for step in (1, 2):
        tracker.metrics_logged(step, {"a": 1.0})
    deadline = time.monotonic() + 10
    while len(tracker.written) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    end(tracker)
    assert [step for step, _ in tracker.written] == [1, 2]
    assert [r.getMessage() for r in caplog.records] == [
        "tracker list: the run could not be opened: OSError: no network; training continues"
    ]


def test_a_call_that_always_fails_is_lost_and_the_next_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(ListTracker):
        def write_metrics(self, step, metrics):
            if step == 1:
                raise ValueError("a refused name")
            super().write_metrics(step, metrics)

    tracker = begin(Refusing(), tmp_path)
    for step in (1, 2):
        tracker.metrics_logged(step, {"a": 1.0})
    end(tracker)
    assert [step for step, _ in tracker.written] == [2]
    assert "a refused name" in caplog.text
    assert "written: 0 dropped because the queue was full (queue_size=10000), 1 failed" in caplog.text  # fmt: skip


def test_values_that_no_curve_can_hold_are_left_out_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = begin(ListTracker(), tmp_path)
    for step, value in enumerate([1.0, math.nan, math.inf, "high", [1, 2], None, True], start=1):
        tracker.metrics_logged(step, {"a": value, "b": 0.5})
    end(tracker)
    assert [(s, m["a"]) for s, m in tracker.written if "a" in m] == [(1, 1.0), (7, 1.0)]
    assert len([1 for _, m in tracker.written if m["b"] == 0.5]) == 7
    assert [r.getMessage().partition(":")[2] for r in caplog.records] == [
        " metric a at step 2 is left out: it is nan; expected a finite number",
        " metric a at step 4 is left out: it is of type str; expected a number",
    ]


def test_a_resumed_run_keeps_its_id_and_logs_no_step_twice(tmp_path: Path) -> None:
    first = begin(ListTracker(), tmp_path)
    for step in (1, 2, 3):
        first.metrics_logged(step, {"a": 1.0})
    first.metrics_logged(2, {"val/mean@1": 0.5})
    end(first, "stopped")
    second = begin(ListTracker(), tmp_path, start_step=1)
    for step in (2, 3, 4):
        second.metrics_logged(step, {"a": 1.0, "val/mean@1": 0.5})
    end(second)
    assert second.opened[0].run_id == "new"
    assert second.written == [
        (3, {"val/mean@1": 0.5}),
        (4, {"a": 1.0, "val/mean@1": 0.5}),
    ]


def test_a_run_id_of_another_project_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end(begin(ListTracker(project="one"), tmp_path))
    other = end(begin(ListTracker(project="two"), tmp_path, start_step=3))
    assert other.opened[0].run_id is None
    assert "belongs to project 'one', not to 'two'" in caplog.text


def test_config_and_files_come_from_the_run_directory(tmp_path: Path) -> None:
    directory = tmp_path / "sums" / "first"
    directory.mkdir(parents=True)
    text = "seed: 3\nactor: {optim: {lr: 0.1}}\ngiven: [seed, actor.optim.lr]\n"
    (directory / "config.yaml").write_text(text)
    (directory / "plan.json").write_text("{}")
    (run,) = end(begin(ListTracker(), directory)).opened
    assert (run.project, run.name) == ("sums", "first")
    assert run.config == {"seed": 3, "actor": {"optim": {"lr": 0.1}}}
    assert [file.name for file in run.files] == ["config.yaml", "plan.json"]


def test_a_directory_that_cannot_be_written_stops_no_curve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trackers").write_text("a file in the place of the folder")
    tracker = begin(ListTracker(), tmp_path)
    tracker.metrics_logged(1, {"a": 1.0})
    end(tracker)
    assert tracker.written == [(1, {"a": 1.0})]
    assert caplog.text.count(f"{tmp_path / 'trackers'} can't be written") == 1


def test_a_missing_library_is_one_error_that_says_what_to_install() -> None:
    class Lacking(ListTracker):
        module = "no_such_library"

    with pytest.raises(PluginNeedsError) as caught:
        Lacking()
    assert "tracker 'list' needs the module 'no_such_library'" in caught.value.message
    assert caught.value.hint == "pip install 'dovetail-trackers[list]'"


def test_no_library_is_imported_before_its_tracker_is_opened() -> None:
    code = (
        "import sys, json\n"
        "from dovetail_trackers import conformance\n"
        "print(json.dumps([m for m in ('wandb','mlflow','tensorboard','swanlab','trackio') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
