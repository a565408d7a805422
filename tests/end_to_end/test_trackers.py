"""Curves of a run that was killed and resumed, read back with the trackers' own libraries."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
METRIC = "reward/mean"
TRACKING = (
    "tracking=[jsonl, mlflow, tensorboard, trackio, {name: wandb, mode: offline}, "
    "{name: swanlab, mode: offline}]"
)

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in TRACKERS),
        reason="the trackers' libraries are not installed here",
    ),
]

Curve = list[tuple[int, float]]
"""Steps with their values, in the order in which they were logged."""


def once(points: Iterable[tuple[int, float]]) -> Curve:
    """Without what is there twice with one value: what a process was writing, or had just written, when it was killed."""
    found: dict[int, float] = {}
    for step, value in points:
        assert found.setdefault(step, value) == value
    return list(found.items())


def of_wandb(run: Path, metric: str) -> Curve:
    """Out of the files that `wandb sync` sends."""
    from swanlab.converter.wb.wbdatastore import DataStoreTruncatedError, WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        # The last record of a killed process may be torn.
        with WBDataStoreReader() as reader, suppress(DataStoreTruncatedError):
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = Record.FromString(data)
                items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                if metric in items:
                    found.append((int(items["step"]), json.loads(items[metric])))
    return once(found)


def of_swanlab(run: Path, metric: str) -> Curve:
    """Out of the files that `swanlab sync` sends, which leaves out a step of a metric that was there before."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[int, float] = {}
    for file in sorted(run.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.HasField("scalar") and record.scalar.key == metric:
                found.setdefault(record.scalar.step, record.scalar.value.number)
    return list(found.items())


def of_mlflow(run: Path, metric: str) -> Curve:
    """Of the only run in the folder."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.parent.parent / "mlruns").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name(run.parent.name).experiment_id])
    assert kept.info.status == "FINISHED"
    history = client.get_metric_history(
        kept.info.run_id, metric.replace("/", ".").replace("@", "_at_")
    )
    return once((point.step, point.value) for point in history)


def of_tensorboard(run: Path, metric: str) -> Curve:
    """As TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(metric)]


def of_trackio(run: Path, metric: str) -> Curve:
    """In a process of its own, since trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage\n"
        f"rows = SQLiteStorage.get_logs({run.parent.name!r}, {run.name!r})\n"
        f"print(json.dumps([(row['step'], row[{metric!r}]) for row in rows if {metric!r} in row]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [(step, value) for step, value in json.loads(done.stdout.splitlines()[-1])]


def logged(run: Path, name: str) -> int:
    """The last step of the metric that a tracker has logged."""
    try:
        steps = json.loads((run / "trackers" / f"{name}.json").read_text())["last_steps"]
    except FileNotFoundError:
        return 0
    return int(steps.get(METRIC, 0))


def test_a_killed_and_resumed_run_shows_one_continuous_curve_in_each(
    config: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    dovetail: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    # W&B's service of this process, which earlier tests may have begun, would outlive the killed run and hold its id.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    # The fourth step, whose samples come after 3 · 16 others, waits until the test lets it pass: the kill comes before.
    with (tmp_path / "my_reward.py").open("a") as file:
        file.write(
            "import itertools, pathlib, time\n_score, _calls = compute_score, itertools.count(1)\n"
            "def compute_score(*a, **k):\n"
            f"    while next(_calls) > 48 and not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n"
            "        time.sleep(0.05)\n"
            "    return _score(*a, **k)\n"
        )
    command = (
        *("train", str(config), "trainer.total_steps=4", "trainer.total_epochs=2"),
        *("trainer.save_every=2", "trainer.validate_before=false", "trainer.validate_after=false"),
        "reward.timeout=300",
        TRACKING,
    )
    run = tmp_path / "runs" / "tests" / "run"

    killed = start(*command)
    while min(logged(run, name) for name in TRACKERS) < 3:
        assert not killed.ended, killed.wait()
        time.sleep(0.02)
    killed.send(signal.SIGKILL)
    assert killed.wait().returncode == -signal.SIGKILL
    (tmp_path / "go").touch()
    resumed = dovetail(*command)
    assert "continues from step_2" in resumed.stdout
    assert "were not written" not in resumed.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], row[METRIC]) for row in rows if METRIC in row]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    read = {name: globals()[f"of_{name}"](run, METRIC) for name in TRACKERS}
    for name, curve in read.items():
        assert [step for step, _ in curve] == [1, 2, 3, 4], (name, read)
        assert [value for _, value in curve] == pytest.approx([v for _, v in expected]), name


@pytest.mark.nightly
def test_the_curves_of_the_demo_are_continuous_in_each_after_a_kill(
    tmp_path: Path,
    start: Callable[..., Any],
    dovetail: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    steps, overrides = 16, ("trainer.total_steps=16", "trainer.save_every=4", TRACKING)
    run = tmp_path / "demo" / "runs" / "arithmetic" / "seed_1"
    killed = start("demo", f"--out={tmp_path / 'demo'}", *overrides)
    while min(logged(run, name) for name in TRACKERS) < 6:
        assert not killed.ended, killed.wait()
        time.sleep(0.02)
    killed.send(signal.SIGKILL)
    assert killed.wait().returncode == -signal.SIGKILL
    resumed = dovetail("train", str(tmp_path / "demo" / "seed_1" / "config.yaml"), *overrides)
    assert "continues from step_" in resumed.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for metric, known in ((METRIC, steps), ("actor/grad_norm", steps), ("val/mean@1", 3)):
        expected = {row["step"]: row[metric] for row in rows if metric in row}
        assert len(expected) == known
        for name in TRACKERS:
            curve = globals()[f"of_{name}"](run, metric)
            assert [step for step, _ in curve] == list(expected), (name, metric)
            assert [value for _, value in curve] == pytest.approx(list(expected.values())), name
