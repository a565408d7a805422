"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dovetail.dispatch import Future
from dovetail.errors import CheckpointError, DiskFullError
from dovetail.hooks import hookimpl


class Usage(NamedTuple):
    """As of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


class Metrics:
    """An observer that notes metrics of checkpoints."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    @hookimpl
    def metrics_logged(self, metrics: Any) -> None:
        if "time/checkpoint" in metrics:
            self.seconds.append((metrics["time/checkpoint"], metrics["time/checkpoint_blocking"]))


@pytest.fixture
def slow(worker_group):
    """An actor whose files are on the disk once `written` is set; `failure` is raised then."""

    class Slow(worker_group):
        def __init__(self) -> None:
            super().__init__()
            self.written = threading.Event()
            self.failure: Exception | None = None

        def finish_save(self) -> Future[None]:
            assert self.written.wait(30)
            return Future.failed(self.failure) if self.failure else Future.completed(None)

    return Slow()


def test_training_goes_on_and_the_pointer_moves_once_all_is_written(compose, slow):
    made = compose(actor=slow)
    made.observers.add(observed := Metrics())
    with made.run.record.running():
        made.run.publish_weights()
        made.step()
        made.run.save()
        made.step()
        assert made.store.latest() is None
        slow.written.set()
        made.run.record.finish_save()
        latest = made.store.latest()
    assert latest is not None
    assert latest.name == "step_1"
    # Two updates a step: the state is that of step 1, and was copied when it was asked for.
    assert (latest / "actor" / "weights").read_text() == "2"
    [(whole, blocking)] = observed.seconds
    assert 0 < blocking < whole


def test_a_failed_write_ends_the_run_and_names_checkpoint_and_cause(compose, slow):
    made = compose(actor=slow)
    slow.failure = CheckpointError("a file can't be written: Input/output error")
    slow.written.set()

    def run() -> None:
        with made.run.record.running():
            made.run.publish_weights()
            made.step()
            made.run.save()
            made.run.record.finish_save()

    with pytest.raises(CheckpointError, match=r"step 1.*Input/output error"):
        run()
    assert made.store.latest() is None


def test_a_stopped_run_waits_for_its_checkpoint(compose, slow):
    made = compose(actor=slow)
    threading.Timer(0.3, slow.written.set).start()

    def run() -> None:
        with made.run.record.running():
            made.run.publish_weights()
            made.step()
            made.run.save()
            made.stop.request("SIGTERM")
            made.step()

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run()
    assert made.store.latest().name == "step_1"


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_disk_without_room_is_told_before_anything_is_written_and_only_the_end_is_an_error(
    compose, monkeypatch: pytest.MonkeyPatch, asynchronous
):
    made = compose(f"trainer.async_save={asynchronous}")
    with made.run.record.running():
        made.run.publish_weights()
        made.step()
        made.run.save()
        made.run.record.finish_save()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
        monkeypatch.setattr(made.store, "_seal", None)
        made.step()
        made.run.save()
        made.step()
        with pytest.raises(DiskFullError, match=r"needs about .* 10 B.*in .*step_1 is intact"):
            made.run.save()
        monkeypatch.undo()
    [warning] = [text for text in made.logger.warnings if "without this checkpoint" in text]
    assert "checkpoint of step 2" in warning
    assert made.store.latest().name == "step_1"
    assert {path.name for path in Path(made.store.directory).iterdir()} == {"latest", "step_1"}


def test_a_disk_that_stays_full_ends_the_run_and_one_that_is_emptied_in_time_does_not(
    compose,
):
    made = compose("trainer.total_steps=20", "trainer.max_failed_saves=2")

    def save(free: int) -> None:
        with pytest.MonkeyPatch.context() as disk:
            disk.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, free))
            made.step()
            made.run.save()
            made.run.record.finish_save()

    def run() -> None:
        with made.run.record.running():
            made.run.publish_weights()
            for free in (10**12, 10, 10**12, 10, 10):
                save(free)

    with pytest.raises(DiskFullError, match=r"^2 checkpoints.*row .*max_failed_saves") as ended:
        run()
    assert ended.value.exit_code == 75
    # The disk has room again when the run ends, so that its last step is saved all the same.
    assert made.store.latest().name == "step_5"
    assert not made.store.has(2)
