"""A second place for checkpoints: a run continues from it where its directory is gone."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import CheckpointError, ConfigError
from dovetail.run.run import train
from dovetail.run.second_place import CheckpointCopies, SecondPlace


def test_a_run_whose_directory_is_gone_continues_from_the_second_place(
    config: Path, tmp_path: Path
) -> None:
    run, bucket = tmp_path / "runs" / "tests" / "run", tmp_path / "bucket"
    settings = [f"trainer.copy_to={bucket}", "trainer.keep_checkpoints=1", "data.val_files=[]"]
    train(config, [*settings, "trainer.total_steps=2"])
    copies = bucket / "tests" / "run"
    # What the run no longer keeps is not kept there either.
    assert sorted(path.name for path in copies.glob("step_*")) == ["step_2"]
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"bucket/tests/run.*settings: seed"):
        train(config, [*settings, "seed=9"])
    assert not run.exists()
    said: list[str] = []
    summary = train(config, [*settings, "trainer.total_steps=3"], say=said.append)
    assert summary["steps"] == 3
    assert any("step_2 is taken from" in line for line in said)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "actor/pg_loss" in row] == [1, 2, 3]
    assert sorted(path.name for path in copies.glob("step_*")) == ["step_3"]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    for step in (1, 2, 3):
        store.save(step, lambda directory: (directory / "weights").write_text(str(directory)))
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    return store


def test_a_copy_that_is_not_complete_is_none(store: CheckpointStore, tmp_path: Path) -> None:
    place = SecondPlace(str(tmp_path / "bucket"), "math/grpo")
    assert place.newest() is None
    place.update(store, tmp_path / "run")
    assert place.newest() == "step_3"
    (tmp_path / "bucket/math/grpo/step_3/manifest.json").unlink()
    assert place.newest() == "step_2"
    place.update(store, tmp_path / "run")
    assert place.newest() == "step_3"


def test_a_damaged_copy_is_refused_and_leaves_nothing(
    store: CheckpointStore, tmp_path: Path
) -> None:
    place = SecondPlace(f"file://{tmp_path}/bucket", "math/grpo")
    place.update(store, tmp_path / "run")
    (tmp_path / "bucket/math/grpo/step_3/weights").write_text("other")
    with pytest.raises(CheckpointError, match=r"step_3 is.*has 5 bytes"):
        place.fetch("step_3", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["checkpoints"]


def test_an_unknown_file_system_is_one_error() -> None:
    with pytest.raises(ConfigError, match=r"copy_to = nowhere://x can't be used"):
        SecondPlace("nowhere://x", "math/grpo")


def test_a_run_that_ends_while_a_copy_begins_does_not_wait_for_another(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = CheckpointCopies(
        SecondPlace(str(tmp_path / "bucket"), "math/grpo"), store, logging.getLogger()
    )
    wanted, clear = copies._wanted, copies._wanted.clear

    def ends() -> None:
        copies._ending = True
        wanted.set()
        clear()

    monkeypatch.setattr(wanted, "clear", ends)
    copies.run_started()
    copies._thread.join(20)
    assert not copies._thread.is_alive()
