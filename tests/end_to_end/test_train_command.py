"""`dovetail train` on a tiny model: everything from the config file to the report."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dovetail.errors import ConfigError, RewardError, StopRequested
from dovetail.run.interrupt import StopSwitch
from dovetail.run.run import resume, train
from dovetail.run.training_run import TrainingRun
from dovetail_stages.advantage import EstimateAdvantages
from dovetail_stages.update_actor import UpdateActor


def metrics(run: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, object]:
    """The actor's weights in a checkpoint."""
    [file] = (run / "checkpoints" / f"step_{step}" / "actor" / "weights").glob("*.safetensors")
    return dict(load_file(file))


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize("tracking", ["[]", "[jsonl]", "[console]"])
def test_a_run_says_where_it_is_and_how_it_ended_whatever_tracks_it(
    config, inside, tmp_path, tracking
):
    run = tmp_path / "runs" / "tests" / "run"
    short = ("trainer.total_steps=1", "data.val_files=[]", f"tracking={tracking}")
    printed = inside("train", str(config), *short).stdout
    assert printed.count("run directory: ") == 1
    last = [line for line in printed.splitlines() if line.strip()][-1]
    assert ("completed, 1 of 1 steps" in last) == (tracking != "[console]")
    assert printed.casefold().count("completed") == 1
    assert printed.count(str(run)) >= 2


@pytest.mark.usefixtures("report")
def test_a_run_leaves_everything_that_a_person_looks_at(config, dovetail, tmp_path):
    printed = dovetail("train", str(config))
    run = tmp_path / "runs" / "tests" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == 3
    assert summary["seed"] == 3
    assert summary["accuracy_before"] >= 0
    assert summary["train_seconds"] > 0
    steps = [m for m in metrics(run) if "actor/pg_loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3]
    for name in (
        "reward/mean",
        "response_length/mean",
        "actor/grad_norm",
        "actor/lr",
        "actor/entropy",
        "time/rollout",
        "time/update_actor",
        "time/weight_sync",
        "time/step",
        "perf/tokens_per_second",
        "perf/rss_bytes",
        "actor/rss_bytes",
    ):
        assert all(name in m for m in steps), name
    rows = [json.loads(x) for x in (run / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert {"prompt", "response", "score"} <= rows[0].keys()
    assert "data-chart=" in (run / "report.html").read_text()
    assert (run / "config.yaml").exists()
    assert "dovetail-core" in (run / "plugins.lock.json").read_text()
    assert str(run) in printed.stdout
    assert "4 prompts × 4 = 16 samples" in printed.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.mini_batch_size=2", "actor.epochs=2"],
        ["rollout.weight_transport=disk", "data.sampler=sequential"],
    ],
)
def test_plugins_are_switched_by_an_override(config, overrides):
    summary = train(config, [*overrides, "trainer.total_steps=2"])
    assert summary["status"] == "completed"


def test_a_resumed_run_is_bit_identical_to_one_never_stopped(config, tmp_path):
    train(config, ["experiment=whole", "actor.mini_batch_size=2"])
    train(config, ["experiment=parts", "actor.mini_batch_size=2", "trainer.total_steps=2"])
    parts = tmp_path / "runs" / "tests" / "parts"
    resume(parts, ["trainer.total_steps=3"])
    whole = tmp_path / "runs" / "tests" / "whole"
    assert same(weights(parts, 3), weights(whole, 3))
    assert [m["step"] for m in metrics(parts) if "actor/pg_loss" in m] == [1, 2, 3]


def test_ctrl_c_saves_and_exits_130_and_the_run_can_go_on(config, start, tmp_path):
    run = tmp_path / "runs" / "tests" / "run"
    command = start("train", str(config), "trainer.total_steps=400", "trainer.save_every=0")
    while not command.ended:
        if (run / "metrics.jsonl").exists() and len(metrics_lines(run)) >= 3:
            break
        time.sleep(0.1)
    command.send(signal.SIGINT)
    done = command.wait()
    assert done.returncode == 130, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "stopped"
    steps = summary["steps"]
    assert (run / "checkpoints" / f"step_{steps}").is_dir()
    resume(run, [f"trainer.total_steps={steps + 1}"])
    assert json.loads((run / "summary.json").read_text())["steps"] == steps + 1


def metrics_lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def stop_at(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, step: int) -> StopSwitch:
    """A switch that asks for a stop while this method runs, after so many finished steps."""
    stop, original = StopSwitch(), getattr(cls, method)

    def method_with_stop(self, *args):
        done = self.position.step if cls is TrainingRun else args[-1].number - 1
        if done == step:
            stop.request("a test")
        return original(self, *args)

    monkeypatch.setattr(cls, method, method_with_stop)
    return stop


@pytest.fixture(scope="module")
def never_stopped() -> dict[str, object]:
    """The actor's weights at the end of the run that is not stopped, once a test has made them."""
    return {}


@pytest.mark.parametrize(
    ("cls", "method", "step", "saved"),
    [
        (TrainingRun, "publish_weights", 0, 0),
        (TrainingRun, "validate", 0, 0),
        (TrainingRun, "collect", 1, 1),
        (EstimateAdvantages, "run", 1, 1),
        (UpdateActor, "run", 1, 2),
        (TrainingRun, "publish_weights", 1, 2),
        (TrainingRun, "validate", 3, 3),
    ],
)
def test_a_stop_at_any_time_is_saved_and_resumes_to_the_same_end(
    config, tmp_path, monkeypatch, never_stopped, cls, method, step, saved
):
    runs = tmp_path / "runs" / "tests"
    if not never_stopped:
        train(config, ["experiment=whole", "trainer.save_every=0"])
        never_stopped |= weights(runs / "whole", 3)
    with monkeypatch.context() as patch:
        stop = stop_at(patch, cls, method, step)
        with pytest.raises(StopRequested):
            train(config, ["experiment=parts", "trainer.save_every=0"], stop=stop)
    parts = runs / "parts"
    assert (parts / "checkpoints" / f"step_{saved}").is_dir()
    assert json.loads((parts / "summary.json").read_text())["status"] == "stopped"
    summary = resume(parts)
    assert summary["status"] == "completed"
    assert same(weights(parts, 3), never_stopped)


def test_a_failing_step_leaves_the_finished_ones_saved(config, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global calls\n    calls += 1\n"
        "    if calls > 32:\n        raise ValueError('no more')\n    return 1.0 * len(solution_str)\n"
    )
    with pytest.raises(RewardError):
        train(config, ["trainer.save_every=0", "trainer.validate_before=false"])
    run = tmp_path / "runs" / "tests" / "run"
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert (run / "checkpoints" / "step_2").is_dir()
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 * len(solution_str)\n"
    )
    assert resume(run)["steps"] == 3


def test_overrides_of_a_resume_belong_to_the_run_from_then_on(config, tmp_path):
    train(config, ["trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    said: list[str] = []
    resume(run, ["trainer.total_steps=2", "actor.optim.lr=0.02"], say=said.append)
    assert [line for line in said if line.startswith("changed: ")] == [
        "changed: actor.optim.lr: 0.01 → 0.02",
        "changed: trainer.total_steps: 1 → 2",
    ]
    assert "total_steps: 2" in (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"2 steps are done,.*has 2"):
        resume(run)


@pytest.mark.parametrize("size", ["24k", "88k", pytest.param("300k", marks=pytest.mark.nightly)])
def test_a_full_disk_is_one_error_that_names_what_could_not_be_written(
    config, dovetail, tmp_path, size
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system can't be mounted here")
    try:
        done = dovetail(
            "train", str(config), f"output_dir={disk}", "trainer.save_every=0", check=False
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode > 0
    assert "Traceback" not in done.stderr
    error = done.stderr[done.stderr.rindex("error: ") :]
    if size == "24k":
        assert re.search(r"samples/.*\.jsonl can't be written: No space left on device", error)
    else:
        assert "checkpoint of step 3 needs" in error


@pytest.mark.parametrize(
    ("manager", "thread"),
    [
        ("naive", False),
        ("batch", True),
        pytest.param("batch", False, marks=pytest.mark.nightly),
        pytest.param("naive", True, marks=pytest.mark.nightly),
    ],
)
def test_a_reward_that_ends_the_process_does_not_end_the_run_as_if_all_were_well(
    config, dovetail, tmp_path, manager, thread
):
    leave = "threading.Thread(target=_exit, args=(0,)).start()" if thread else "os._exit(0)"
    (tmp_path / "my_reward.py").write_text(
        "import os, threading\nfrom os import _exit\ncalls = 0\ndef compute_score(solution_str):\n"
        f"    global calls\n    calls += 1\n    if calls > 20: {leave}\n    return 1.0 * len(solution_str)\n"
    )
    done = dovetail("train", str(config), f"reward.manager={manager}", check=False)
    summary = json.loads((tmp_path / "runs" / "tests" / "run" / "summary.json").read_text())
    assert "os._exit(0)" in done.stderr
    assert (done.returncode == 0) == (summary["status"] == "completed") == thread
    if not thread:
        assert "my_reward.py:compute_score" in done.stderr


KEYED = """
import attrs
from dovetail.interfaces import RewardFunction
from dovetail.sections import PluginSection

@attrs.frozen(kw_only=True)
class Keys(PluginSection):
    key: str
    again: str

class Keyed(RewardFunction):
    Config = Keys
    def compute_score(self, solution_str):
        assert self.config.key == self.config.again == "x hunter2-öäü"
        return 1.0 * len(solution_str)
"""


def test_a_value_of_the_environment_is_in_no_file_of_a_run_and_is_read_again_by_a_resume(
    config, dovetail, tmp_path, monkeypatch
):
    monkeypatch.setenv("SECRET_OF_A_TEST", "hunter2-öäü")
    (tmp_path / "keyed.py").write_text(KEYED)
    given = (
        f"reward.function={{path: {tmp_path / 'keyed.py'}, attribute: Keyed, "
        "key: 'x ${oc.env:SECRET_OF_A_TEST}', again: '${.key}'}"
    )
    dovetail("train", str(config), given, "trainer.total_steps=1")
    run = tmp_path / "runs" / "tests" / "run"
    dovetail("resume", str(run), "trainer.total_steps=2")
    kept = (run / "config.yaml").read_text()
    assert "key: x ${oc.env:SECRET_OF_A_TEST}" in kept
    assert "again: ${.key}" in kept
    for file in run.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes(), file
    monkeypatch.delenv("SECRET_OF_A_TEST")
    refused = dovetail("resume", str(run), "trainer.total_steps=3", check=False)
    assert "SECRET_OF_A_TEST" in refused.stderr
