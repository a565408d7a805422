"""A run that is killed anywhere goes on with the same command, and ends as one that was not, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import POINTS, Kill, left_by, prompts_used

from dovetail.errors import CheckpointError
from dovetail.run.requeue import newest_whole
from dovetail.run.run import train
from dovetail.telemetry.run_directory import RunDirectory

FLAKY_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 7 == 0:
        raise ValueError("no answer of this length can be scored")
    return sum(c.isalpha() for c in solution_str) / 50
"""

VARIANTS = {
    "grpo": [],
    "two kept": ["trainer.save_every=2", "trainer.keep_checkpoints=2"],
    "dapo": ["algorithm.preset=dapo", "algorithm.overlong_penalty=null"],
    "critic": ["algorithm.preset=ppo", "critic.path={model}"],
    "lora": ["actor.engine.lora={{rank: 4}}"],
    "refill": [
        "reward.function={{path: {folder}/flaky_reward.py, attribute: compute_score}}",
        "reward.on_failure=refill",
        "reward.max_failure_share=0.9",
    ],
    "best": [
        *("trainer.validate_every=1", "trainer.best_metric=val/mean@1"),
        *("trainer.keep_checkpoints=1", "trainer.export=best"),
    ],
}
KILLS = {"grpo": 12, "two kept": 8, "dapo": 8, "critic": 8, "lora": 8, "refill": 8, "best": 8}


class Runs:
    """Runs of one variant below a folder, each the same command until it is finished."""

    def __init__(self, start: Callable[..., Any], config: Path, tiny: Path, variant: str) -> None:
        (config.parent / "flaky_reward.py").write_text(FLAKY_REWARD)
        places = {"model": tiny, "folder": config.parent}
        self._settings = [
            *("trainer.total_epochs=2", "trainer.samples_per_step=-1", "tracking=[jsonl]"),
            *(setting.format(**places) for setting in VARIANTS[variant]),
        ]
        self._start, self._config = start, config
        self.directory = config.parent / "runs" / "tests"

    def started(self, name: str, kill: Kill | None = None, *settings: str) -> Any:
        """The command of a run, in a process of its own."""
        args = ("train", str(self._config), *self._settings, f"experiment={name}", *settings)
        return self._start(*args, kill=kill)

    def undisturbed(self, name: str, *settings: str) -> dict[str, str]:
        """A run that is not killed, and what it left."""
        done = self.started(name, None, *settings).wait()
        assert done.returncode == 0, done.stdout + done.stderr
        return left_by(self.directory / name)

    def killed_at(self, name: str, kill: Kill) -> bool:
        """A sitting of a run that ends at a point; false where it does not come there, and ends as it should."""
        done = self.started(name, kill).wait()
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
        return bool(done.returncode)

    def killed_after(self, name: str, seconds: float) -> bool:
        """A sitting of a run that ends after a time; false where it was finished before."""
        command = self.started(name)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not command.ended:
            time.sleep(0.005)
        command.send(signal.SIGKILL)
        done = command.wait()
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
        return bool(done.returncode)


@pytest.fixture
def runs(start: Callable[..., Any], config: Path, tiny: Path) -> Callable[[str], Runs]:
    """Runs of a variant."""
    return lambda variant: Runs(start, config, tiny, variant)


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names by which two runs differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def test_a_run_killed_three_times_ends_as_one_that_was_not(runs: Callable[[str], Runs]) -> None:
    of = runs("two kept")
    expected = of.undisturbed("undisturbed", "trainer.async_save=false")
    kills = [POINTS["asynchronous saving"][0], POINTS["pointer swap"][0], POINTS["export"][1]]
    for (function, when), call in zip(kills, (2, 1, 1), strict=True):
        assert of.killed_at("killed", (function, call, when)), function
    assert differing(expected, of.undisturbed("killed")) == []
    used = prompts_used(of.directory / "killed")
    assert used == {(epoch, prompt): 1 for epoch in range(2) for prompt in range(12)}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_random_instants_ends_as_one_that_was_not(
    runs: Callable[[str], Runs], variant: str, record_property: Callable[[str, object], None]
) -> None:
    of, chance = runs(variant), random.Random(variant)
    expected = of.undisturbed("undisturbed")
    began = time.monotonic()
    assert differing(expected, of.undisturbed("again")) == []
    seconds = time.monotonic() - began
    kills = ended = 0
    while kills < KILLS[variant]:
        name = f"killed_{ended}"
        for _ in range(4):
            kills += of.killed_after(name, chance.uniform(0, 1.05 * seconds))
        assert differing(expected, of.undisturbed(name)) == []
        ended += 1
    record_property("kills", kills)
    used = prompts_used(of.directory / "undisturbed")
    assert set(used.values()) == {1}
    assert len(used) == 24 or variant in ("dapo", "refill")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_every_named_point_ends_as_one_that_was_not(
    runs: Callable[[str], Runs], point: str
) -> None:
    of = runs("best")
    expected = of.undisturbed("undisturbed")
    for number, (function, when) in enumerate(POINTS[point]):
        name = f"killed_{number}"
        if point == "requeue":
            assert of.killed_at(name, (POINTS["end of a step"][0][0], 3, "after"))
        kills = [of.killed_at(name, (function, call, when)) for call in (1, 2)]
        assert kills[0], function
        assert differing(expected, of.undisturbed(name)) == [], (function, when)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_every_damaged_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(
    config: Path, damage: str
) -> None:
    train(config, ["trainer.total_steps=2", "trainer.validate_before=false", "data.val_files=[]"])
    run = RunDirectory(config.parent / "runs" / "tests" / "run")
    newest, before = (run.checkpoints / f"step_{step}" for step in (2, 1))
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for file in files:
        content, said = file.read_bytes(), []
        middle = len(content) // 2
        if damage == "missing":
            file.unlink()
        else:
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            file.write_bytes(content[:middle] if damage == "truncated" else flipped)
        assert newest_whole(run, said.append) == before, file
        [line] = said
        assert str(file.relative_to(newest)) in line or file.name == "manifest.json"
        assert "going back" in line
        file.write_bytes(content)
    assert newest_whole(run, print) == newest
    for file in (path for path in (newest / "state.json", before / "state.json")):
        file.write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is intact"):
        newest_whole(run, print)


def test_a_disk_that_turns_read_only_is_one_error_and_loses_nothing(
    config: Path, dovetail: Callable[..., Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("a file system can't be mounted here")
    command = ("train", str(config), f"output_dir={disk}")
    try:
        dovetail(*command, "trainer.total_steps=1")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        refused = dovetail(*command, check=False)
        assert refused.returncode > 0
        assert "Traceback" not in refused.stderr
        [error] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert "Read-only file system" in error
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert "continues from step_1" in dovetail(*command).stdout
    finally:
        subprocess.run(["umount", str(disk)], check=True)
