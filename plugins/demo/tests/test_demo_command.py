"""`dovetail demo` reports errors at once, and the config that it writes is the run's config."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import main
from dovetail.config import load_config
from dovetail.telemetry import RunDirectory
from dovetail_demo import CONFIG, SFT_CONFIG
from dovetail_demo.command import config_text
from dovetail_demo.warm_start import BATCH_SIZE


def demo(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--out", str(out), *arguments])


def test_a_wrong_override_is_an_error_before_anything_is_written(tmp_path):
    done = demo(tmp_path / "demo", "rolout.n=4")
    assert done.exit_code == 2
    assert "rolout" in done.stderr
    assert "rollout" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "demo").exists()


def test_a_run_that_is_there_is_left_alone(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "arithmetic" / "seed_1")
    done = demo(tmp_path)
    assert done.exit_code == 2
    assert f"{str(run.path)!r} already holds a run" in done.stderr
    assert "experiment=NAME" in done.stderr
    assert not (tmp_path / "seed_1").exists()


def test_a_folder_that_cant_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = demo(tmp_path / "file" / "demo")
    assert done.exit_code == 2
    assert str(tmp_path / "file" / "demo") in done.stderr
    assert "--out" in done.stderr


@pytest.mark.parametrize(
    "folder", ["demo", "a_demo/x", "seed_1", "with blank: # and \"quote\" and 'é'"]
)
def test_the_config_names_the_folder_and_the_seed(tmp_path, folder):
    out = tmp_path / folder
    path = tmp_path / "config.yaml"
    path.write_text(config_text(CONFIG, out, 7), encoding="utf-8")
    config = load_config(path).config
    assert config.seed == 7
    assert config.experiment == "seed_7"
    assert Path(config.output_dir) == out / "runs"
    assert Path(config.model.path) == out / "seed_7" / "warm_start" / "final"
    assert [*map(Path, (*config.data.train_files, *config.data.val_files))] == [
        out / "seed_7" / "data" / "train.parquet",
        out / "seed_7" / "data" / "val.parquet",
    ]
    path.write_text(config_text(SFT_CONFIG, out, 7), encoding="utf-8")
    supervised = load_config(path).config
    assert supervised.seed == 7
    assert RunDirectory.path_for(supervised) == out / "seed_7" / "warm_start"
    assert Path(supervised.model.path) == out / "seed_7" / "base"
    assert [*map(Path, supervised.data.train_files)] == [out / "seed_7" / "data" / "sft.parquet"]


def test_the_sft_config_trains_as_long_as_the_demonstrations_are():
    config = load_config(SFT_CONFIG).config
    assert config.data.train_batch_size == BATCH_SIZE
    assert config.trainer.total_epochs == 1
