"""The same `dovetail train` again: it continues what was stopped or killed, and leaves what is finished as it is."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from dovetail.errors import CheckpointError, ConfigError, RunDirectoryError
from dovetail.run.run import resume, train

LONGER = "trainer.total_steps=2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run directory."""
    return tmp_path / "runs" / "tests" / "run"


@pytest.fixture
def begun(config: Path, run: Path) -> Path:
    """The config of a run of two steps that did only its first."""
    train(config, ["trainer.total_steps=1"])
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("total_steps: 1", "total_steps: 2"))
    (run / "summary.json").unlink()
    return config


def steps(run: Path) -> list[int]:
    """Of which steps the metrics are there."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "actor/pg_loss" in row]


def test_a_finished_run_stays_as_it_is(
    config: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(config, ["trainer.total_steps=1"])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train(config, ["trainer.total_steps=1"], say=print) == summary
    assert capsys.readouterr().out.endswith("is finished; experiment=NAME starts another run\n")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("key", ["seed=5", "algorithm.advantage=rloo", "data.train_batch_size=6"])
def test_another_seed_algorithm_or_data_is_another_run_unless_accepted(
    begun: Path, run: Path, key: str
) -> None:
    name, _, value = key.partition("=")
    with pytest.raises(ConfigError, match=rf'other settings: {name}.*→ "?{value}') as refused:
        train(begun, [LONGER, key])
    assert "--accept-changes" in str(refused.value.hint)
    assert train(begun, [LONGER, key], accept_changes=True)["steps"] == 2
    assert steps(run) == [1, 2]


def test_a_run_without_a_checkpoint_starts_from_the_beginning_and_says_so(
    begun: Path, run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    said: list[str] = []
    train(begun, [LONGER], say=said.append)
    assert said == [f"{run} holds no checkpoint: the run starts from the beginning"]
    assert steps(run) == [1, 2]


def test_a_completed_run_without_a_checkpoint_is_not_repeated(begun: Path, run: Path) -> None:
    train(begun, [LONGER, "trainer.save_last=false"])
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunDirectoryError, match="already holds a run") as refused:
        train(begun, ["trainer.total_steps=3"])
    assert "under way" not in str(refused.value)
    assert "rm -r" in str(refused.value.hint)
    assert steps(run) == [1, 2]


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(
    config: Path, run: Path
) -> None:
    train(config, [LONGER])
    [weights] = (run / "checkpoints" / "step_2" / "actor" / "weights").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    said: list[str] = []
    train(config, ["trainer.total_steps=3"], say=said.append)
    assert any("step_2 is damaged" in line and "going back" in line for line in said)
    assert any(line.startswith(f"{run}: continues from step_1, saved ") for line in said)
    assert steps(run) == [1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\x00",
        b'{"step": null}\n{"step": "x", "status": 3}\n{"st',
        b"[" * 99_999,
    ],
    ids=["empty", "torn", "list", "binary", "wrong", "deep"],
)
def test_damaged_files_that_only_inform_do_not_stop_a_resume(
    config: Path, run: Path, content: bytes
) -> None:
    train(config, ["trainer.total_steps=1"])
    for name in ("summary.json", "run.json", "plan.json", "metrics.jsonl", "events.jsonl"):
        (run / name).write_bytes(content)
    said: list[str] = []
    assert resume(run, [LONGER], say=said.append)["status"] == "completed"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "final_step_1").is_dir()
    [line] = [line for line in said if "continues from step_1" in line]
    assert str(run / "checkpoints" / "step_1") in line
    events = [json.loads(line) for line in (run / "events.jsonl").open() if '"saved"' in line]
    assert (events[-1]["step"], events[-1]["path"]) == (1, str(run / "checkpoints" / "step_1"))
    assert datetime.fromisoformat(events[-1]["saved"]).strftime("%H:%M:%S") in line


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"plugins": 3}', b"\xff"])
def test_a_damaged_lock_is_named_and_the_run_can_be_continued_as_another(
    config: Path, run: Path, content: bytes | None
) -> None:
    train(config, ["trainer.total_steps=1"])
    (run / "plugins.lock.json").unlink()
    if content is not None:
        (run / "plugins.lock.json").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"plugins\.lock\.json") as refused:
        resume(run, [LONGER])
    assert f"trainer.resume={run}" in str(refused.value.hint)
    if content is None:
        again = [LONGER, "experiment=second", f"trainer.resume={run}"]
        assert train(run / "config.yaml", again)["steps"] == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"a: 1\n---\nb: 2\n"])
def test_a_damaged_config_of_a_run_is_named(config: Path, run: Path, content: bytes) -> None:
    train(config, ["trainer.total_steps=1"])
    (run / "config.yaml").write_bytes(content)
    for again in (lambda: train(config, [LONGER]), lambda: resume(run, [LONGER])):
        with pytest.raises(ConfigError) as refused:
            again()
        assert str(run / "config.yaml") in refused.value.message


def test_a_run_that_lost_its_marker_says_how_to_restore_it(config: Path, run: Path) -> None:
    train(config, ["trainer.total_steps=1"])
    (run / "run.json").unlink()
    with pytest.raises(RunDirectoryError) as refused:
        resume(run, [LONGER])
    assert "run.json" in str(refused.value.hint)
    (run / "run.json").touch()
    assert resume(run, [LONGER])["steps"] == 2


def test_the_model_of_an_earlier_end_is_kept_apart(config: Path, run: Path) -> None:
    train(config, ["trainer.total_steps=1"])
    before = (run / "final" / "model.safetensors").read_bytes()
    train(config, [LONGER, "trainer.export=none"])
    assert (run / "final_step_1" / "model.safetensors").read_bytes() == before
    assert not (run / "final").exists()


def test_a_new_run_that_has_nothing_left_to_do_is_refused(begun: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"at step 1, .*only 1 steps"):
        train(begun, ["trainer.total_steps=1", "experiment=second", f"trainer.resume={run}"])


def test_a_run_whose_config_is_gone_is_not_continued(begun: Path, run: Path) -> None:
    (run / "config.yaml").unlink()
    with pytest.raises(RunDirectoryError, match=r"config\.yaml is missing"):
        train(begun, [LONGER])


def test_never_refuses_a_directory_with_a_run(begun: Path) -> None:
    with pytest.raises(RunDirectoryError, match="already holds"):
        train(begun, [LONGER, "trainer.resume=never"])


@pytest.mark.parametrize("place", ["", "checkpoints/step_1"], ids=["a run", "a checkpoint"])
def test_a_new_run_begins_where_another_one_was(begun: Path, run: Path, place: str) -> None:
    settings = [LONGER, "experiment=second", f"trainer.resume={run / place}"]
    assert train(begun, settings)["steps"] == 2
    assert steps(run.with_name("second")) == [2]
    assert train(begun, settings)["steps"] == 2


def test_a_run_that_began_elsewhere_and_has_no_checkpoint_begins_there_again(
    begun: Path, run: Path
) -> None:
    second, said = run.with_name("second"), []
    settings = [LONGER, "experiment=second", f"trainer.resume={run}", "trainer.export=none"]
    train(begun, settings)
    summary = json.loads((second / "summary.json").read_text())
    (second / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    shutil.rmtree(second / "checkpoints")
    assert train(begun, settings, say=said.append)["steps"] == 2
    assert any(str(run / "checkpoints" / "step_1") in line for line in said)
    assert steps(second) == [2]


def test_a_place_without_a_checkpoint_is_refused(config: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(config, [f"trainer.resume={tmp_path}"])
    assert not run.exists()
