"""The best checkpoint is never removed, never half marked, and is compared with across sittings."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.checkpoint.best import Best
from dovetail.checkpoint.mark import BestCheckpoint, Mark
from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import CheckpointError
from dovetail.sections import TrainerSection

METRIC = "val/mean@1"


def write(directory: Path) -> None:
    (directory / "model.bin").write_text("weights")


class Log:
    def __init__(self):
        self.warnings = []

    def warning(self, event, **fields):
        self.warnings.append((event, fields))


def test_the_best_one_is_kept_however_many_follow(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.best() is None
    store.save(1, write)
    store.mark_best(1, 0.5, METRIC)
    for step in (2, 3, 4, 5):
        store.save(step, write)
    assert [path.name for path in store.saved()] == ["step_1", "step_4", "step_5"]
    assert store.best() == BestCheckpoint(path=tmp_path / "step_1", metric=METRIC, value=0.5)
    assert store.latest() == tmp_path / "step_5"
    store.mark_best(4, 0.75, METRIC)
    assert [path.name for path in store.saved()] == ["step_4", "step_5"]


def test_the_mark_outlives_the_sitting_and_saving_its_step_again(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(3, write)
    store.mark_best(3, -1.25, METRIC)
    store.save(3, write)
    again = CheckpointStore(tmp_path, keep=1)
    assert again.best() == BestCheckpoint(path=tmp_path / "step_3", metric=METRIC, value=-1.25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step_3"]


def test_only_a_saved_step_with_a_finite_value_can_be_the_best(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write)
    store.mark_best(1, 0.5, METRIC)
    with pytest.raises(CheckpointError, match=r"step 2 can't.*best: .* not a checkpoint"):
        store.mark_best(2, 0.6, METRIC)
    with pytest.raises(CheckpointError, match=r"step_1 can't.*its val/mean@1 is nan"):
        store.mark_best(1, math.nan, METRIC)
    assert store.best().value == 0.5


def test_a_kill_between_a_checkpoint_and_its_mark_loses_neither(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step, value in ((1, 0.25), (2, 0.5)):
        with store.saving(step, mark=Mark(metric=METRIC, value=value)) as directory:
            write(directory)
        if step == 1:
            earlier = (tmp_path / "best").read_text()
    (tmp_path / "best").write_text(earlier)
    again = CheckpointStore(tmp_path, keep=1)
    again.recover()
    assert again.best() == BestCheckpoint(path=tmp_path / "step_2", metric=METRIC, value=0.5)


def test_a_best_checkpoint_that_is_gone_is_none(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write)
    store.mark_best(1, 0.5, METRIC)
    (tmp_path / "step_1" / "manifest.json").unlink()
    assert CheckpointStore(tmp_path).best() is None


@pytest.mark.parametrize("text", ["", "step_1", "{}", '{"checkpoint": 1}', "[]"])
def test_a_damaged_mark_is_reported_when_the_folder_is_opened(tmp_path, text):
    CheckpointStore(tmp_path).save(1, write)
    (tmp_path / "best").write_text(text)
    with pytest.raises(CheckpointError, match=r"best, .*is damaged: .*\n.*delete the file"):
        CheckpointStore(tmp_path)


KILLED = """
import sys
from pathlib import Path
from dovetail.checkpoint.mark import Mark
from dovetail.checkpoint.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
for step in range(1, 100000):
    with store.saving(step, mark=Mark(metric="m", value=float(step))) as directory:
        (directory / "model.bin").write_text(str(step))
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_instant_leaves_a_whole_mark_on_a_whole_checkpoint(tmp_path, seed):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    done = int(process.stdout.readline())
    time.sleep(random.Random(seed).uniform(0, 0.2))
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    done = int(rest[-1]) if rest else done
    store = CheckpointStore(tmp_path, keep=2)
    store.recover()
    best = store.best()
    assert best.value in (done, done + 1)
    assert best.path == store.latest()
    store.verify(best.path)
    assert (best.path / "model.bin").read_text() == str(int(best.value))
    assert not list(tmp_path.glob(".*"))


def test_a_trainer_that_names_no_metric_has_no_best(tmp_path):
    assert Best.of(TrainerSection(), CheckpointStore(tmp_path)) is None


@pytest.mark.parametrize(("best_is", "improving"), [("max", [0.2, 0.4, 0.5]), ("min", [0.2, 0.1])])
def test_only_what_is_better_than_all_before_improves(tmp_path, best_is, improving):
    store = CheckpointStore(tmp_path)
    found = []
    for step, value in enumerate([0.2, 0.2, 0.4, math.nan, 0.1, 0.4, math.inf, 0.5], start=1):
        # A new one each time: what was best is known from the folder alone.
        best = Best.of(TrainerSection(best_metric=METRIC, best_is=best_is), store)
        improved = best.improved({METRIC: value, "val/failures": 0.0})
        if improved is not None:
            with store.saving(step, mark=improved) as directory:
                write(directory)
            found.append(improved.value)
    assert found == improving
    assert store.best().value == improving[-1]


def test_another_metric_begins_anew(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write)
    store.mark_best(1, 0.9, "val/pass@4")
    assert Best(store, METRIC).improved({METRIC: 0.1}) == Mark(metric=METRIC, value=0.1)


def test_a_metric_that_is_missing_is_told_once_with_the_nearest(tmp_path):
    log = Log()
    best = Best(CheckpointStore(tmp_path), "val/mean@l", logger=log)
    for _ in range(2):
        assert (
            best.improved({"val/mean@1": 0.5, "val/mean@1/low": 0.4, "val/failures": 0.0}) is None
        )
    ((event, fields),) = log.warnings
    assert "trainer.best_metric" in event
    assert fields["best_metric"] == "val/mean@l"
    assert fields["nearest"] == "val/mean@1"
    assert fields["figures"] == ["val/failures", "val/mean@1"]
