"""The data that each tracker logged, read back with its library; and errors for bad input."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.interfaces import PluginContext
from dovetail_trackers.background import BackgroundTracker
from dovetail_trackers.mlflow import MlflowTracker
from dovetail_trackers.swanlab import SwanlabTracker
from dovetail_trackers.tensorboard import TensorboardTracker
from dovetail_trackers.trackio import TrackioTracker
from dovetail_trackers.wandb import WandbTracker

LIBRARIES = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
SAMPLE = {"prompt": "1 + 1 =", "response": "2", "score": 1.0}
FILES = {"plan.json", "plugins.lock.json"}

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in LIBRARIES),
        reason="the trackers' libraries are not installed here",
    ),
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, in an environment without logins."""
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = tmp_path / "runs" / "sums" / "first"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("seed: 3\nactor: {optim: {lr: 0.1}}\n")
    for name in FILES:
        (directory / name).write_text("{}")
    return directory


def log(cls: type[BackgroundTracker], directory: Path, **settings: Any) -> None:
    """Log a run of one step with a validation."""
    settings = {"tags": ("easy",), "notes": "a note", "close_seconds": 60.0, **settings}
    context = PluginContext(logger=logging.getLogger("test"))
    tracker = cls(cls.Config(name=cls.name, **settings), context)
    tracker.run_started(None, None, directory, start_step=0, total_steps=1)
    tracker.metrics_logged(1, {"reward/mean": 0.5})
    tracker.metrics_logged(1, {"val/mean@1": 0.25})
    tracker.samples_logged(1, [SAMPLE])
    tracker.run_finished({"status": "completed"})
    tracker.close()


def test_wandb(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    log(WandbTracker, directory, mode="offline")
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    records = []
    with WBDataStoreReader() as reader:
        reader.open(file)
        while (data := reader.scan()) is not None:
            records.append(Record.FromString(data))
    run = next(r.run for r in records if r.HasField("run"))
    assert (run.project, run.display_name, run.notes, list(run.tags)) == ("sums", "first", "a note", ["easy"])  # fmt: skip
    config = {item.key: item.value_json for item in run.config.update}
    assert json.loads(config["actor"]) == {"optim": {"lr": 0.1}}
    rows = [
        {"/".join(item.nested_key): item.value_json for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [row["step"] for row in rows] == ["1", "1", "1"]
    assert (rows[0]["reward/mean"], rows[1]["val/mean@1"]) == ("0.5", "0.25")
    table = file.parent / "files" / json.loads(rows[2]["samples/path"])
    assert json.loads(table.read_text())["data"] == [["1 + 1 =", "2", "1.0"]]
    artifact = next(r.artifact for r in records if r.artifact.type == "dovetail")
    assert {entry.path for entry in artifact.manifest.contents} == {"config.yaml", *FILES}
    assert not [r for r in caplog.records if r.name == "test"]


def test_mlflow(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    log(MlflowTracker, directory, tags=("team=rl",))
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(directory.parent.parent / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"seed": "3", "actor.optim.lr": "0.1"}
    assert run.data.metrics == {"reward.mean": 0.5, "val.mean_at_1": 0.25}
    assert (run.data.tags["team"], run.data.tags["mlflow.note.content"]) == ("rl", "a note")
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "samples", *FILES}
    table = client.download_artifacts(run.info.run_id, "samples/step_1.jsonl")
    assert json.loads(Path(table).read_text()) == SAMPLE
    assert not [r for r in caplog.records if r.name == "test"]


def test_tensorboard(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    log(TensorboardTracker, directory)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("val/mean@1")] == [(1, 0.25)]
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0]
        for tag in events.Tags()["tensors"]
    }
    assert texts["samples"].endswith(b"| 1 + 1 = | 2 | 1.0 |")
    assert texts["run/config.yaml"] == b"    seed: 3\n    actor: {optim: {lr: 0.1}}"
    assert (texts["run/notes"], texts["run/tags"]) == (b"a note", b"easy")
    assert {"run/plan.json", "run/plugins.lock.json"} <= texts.keys()
    assert not [r for r in caplog.records if r.name == "test"]


def test_swanlab(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    log(SwanlabTracker, directory, mode="offline")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = directory.glob("swanlog/run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(data) for data in reader]
    start = next(r.start for r in records if r.HasField("start"))
    assert (start.project, start.name, start.description, list(start.tags)) == ("sums", "first", "a note", ["easy"])  # fmt: skip
    scalars = [r.scalar for r in records if r.HasField("scalar")]
    assert [(s.key, s.step, s.value.number) for s in scalars] == [
        ("reward/mean", 1, 0.5),
        ("val/mean@1", 1, 0.25),
    ]
    (table,) = file.parent.glob("media/text/*.txt")
    assert table.read_text().endswith("| 1 + 1 = | 2 | 1.0 |")
    assert {path.name for path in (file.parent / "files").iterdir()} > {"config.yaml", *FILES}
    assert "lr: 0.1" in (file.parent / "files" / "config.yaml").read_text()
    assert not [r for r in caplog.records if r.name == "test"]


def test_trackio(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """trackio runs in separate processes, since it reads TRACKIO_DIR on import."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log_it = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from pathlib import Path\nfrom test_read_back import *\nlog(TrackioTracker, Path({str(directory)!r}))"
    )
    read_it = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as store\nimport trackio\n"
        "(run,) = trackio.Api().runs('sums')\n"
        "print(json.dumps([store.get_logs('sums', 'first'), run.name, run.config, store.list_artifacts('sums')], default=str))"
    )
    done = None
    for code in (log_it, read_it):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # fmt: skip
        assert "not written" not in done.stderr
    rows, name, config, artifacts = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == [1, 1, 1]
    assert (rows[0]["reward/mean"], rows[1]["val/mean@1"]) == (0.5, 0.25)
    assert rows[2]["samples"]["_value"].endswith("| 1 + 1 = | 2 | 1.0 |")
    assert (name, config["actor"]) == ("first", {"optim": {"lr": 0.1}})
    assert config["run"] == {"tags": ["easy"], "notes": "a note"}
    assert all(file in str(artifacts) for file in FILES)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (WandbTracker, {}, "not logged in to W&B"),
        (SwanlabTracker, {}, "API key"),
        (TrackioTracker, {"space_id": "user/space"}, "Cannot reach https://huggingface.co"),
        (WandbTracker, {"mode": "offline", "project": "a/b"}, "Invalid project name 'a/b'"),
        (SwanlabTracker, {"mode": "offline", "project": "a/b?"}, "project.name"),
        (MlflowTracker, {"uri": "file:///proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_message_and_stops_nothing(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    cls: type[BackgroundTracker],
    settings: dict[str, Any],
    message: str,
) -> None:
    log(cls, directory, **settings)
    first, last = [r.getMessage() for r in caplog.records if r.name == "test"]
    assert first.startswith(f"tracker {cls.name}: the run could not be opened: ")
    assert message in first
    assert "3 log" in last


def test_mlflow_begins_a_new_run_where_the_id_belongs_to_another_experiment(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log(MlflowTracker, directory, project="one")
    kept = directory / "trackers" / "mlflow.json"
    state = json.loads(kept.read_text())
    kept.write_text(json.dumps({**state, "project": "two"}))
    log(MlflowTracker, directory, project="two")
    assert f"run id {state['run_id']} is not in project 'two'" in caplog.text
    assert json.loads(kept.read_text())["run_id"] != state["run_id"]
