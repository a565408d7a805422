"""Curves of a run that was killed and resumed, read back with the trackers' own libraries."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
METRIC = "reward/mean"

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in TRACKERS),
        reason="the trackers' libraries are not installed here",
    ),
]

Curve = list[tuple[int, float]]
"""Steps with their values, in the order in which they were logged."""


def of_wandb(run: Path) -> Curve:
    """Out of the files that `wandb sync` sends."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = Record.FromString(data)
                items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                if METRIC in items:
                    found.append((int(items["step"]), json.loads(items[METRIC])))
    return found


def of_swanlab(run: Path) -> Curve:
    """Out of the files that `swanlab sync` sends, which leaves out a step of a metric that was there before."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[int, float] = {}
    for file in sorted(run.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.HasField("scalar") and record.scalar.key == METRIC:
                found.setdefault(record.scalar.step, record.scalar.value.number)
    return list(found.items())


def of_mlflow(run: Path) -> Curve:
    """Of the only run in the folder."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.parent.parent / "mlruns").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert kept.info.status == "FINISHED"
    history = client.get_metric_history(kept.info.run_id, METRIC.replace("/", "."))
    return [(point.step, point.value) for point in history]


def of_tensorboard(run: Path) -> Curve:
    """As TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(METRIC)]


def of_trackio(run: Path) -> Curve:
    """In a process of its own, since trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage\n"
        f"rows = SQLiteStorage.get_logs('tests', 'run')\n"
        f"print(json.dumps([(row['step'], row[{METRIC!r}]) for row in rows if {METRIC!r} in row]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [(step, value) for step, value in json.loads(done.stdout.splitlines()[-1])]


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
    local = "{name: wandb, mode: offline}, {name: swanlab, mode: offline}"
    command = (
        *("train", str(config), "trainer.total_steps=4", "trainer.total_epochs=2"),
        *("trainer.save_every=2", "trainer.validate_before=false", "trainer.validate_after=false"),
        "reward.timeout=300",
        f"tracking=[jsonl, mlflow, tensorboard, trackio, {local}]",
    )
    run = tmp_path / "runs" / "tests" / "run"

    def logged(name: str) -> int:
        try:
            steps = json.loads((run / "trackers" / f"{name}.json").read_text())["last_steps"]
        except FileNotFoundError:
            return 0
        return steps.get(METRIC, 0)

    killed = start(*command)
    while min(map(logged, TRACKERS)) < 3:
        assert not killed.ended, killed.wait()
        time.sleep(0.02)
    time.sleep(0.8)  # for W&B to write its file: see FLUSH_SECONDS
    killed.send(signal.SIGKILL)
    assert killed.wait().returncode == -signal.SIGKILL
    (tmp_path / "go").touch()
    resumed = dovetail(*command)
    assert "continues from step_2" in resumed.stdout
    assert "were not written" not in resumed.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], row[METRIC]) for row in rows if METRIC in row]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    read = {name: globals()[f"of_{name}"](run) for name in TRACKERS}
    for name, curve in read.items():
        assert [step for step, _ in curve] == [1, 2, 3, 4], (name, read)
        assert [value for _, value in curve] == pytest.approx([v for _, v in expected]), name
