"""The settings of docs/long-runs.md: a run that is killed is started again, and ends as one that was not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from kills import left_by, prompts_used

STEPS = 6
WAIT = 600.0


@pytest.fixture
def command(root: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make the page's command with the page's settings, and what a test has in place of a bucket and a webhook."""
    page = (root / "docs" / "long-runs.md").read_text()
    found = re.search(r"```yaml\n# config.yaml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    document, shown = yaml.safe_load(config.read_text()), yaml.safe_load(found[1])
    document["trainer"] |= shown["trainer"]
    config.write_text(yaml.safe_dump(document | {"tracking": shown["tracking"]}))
    # Alerts come to nothing here, which stops no run; plugins/trackers has their tests.
    monkeypatch.setenv("ALERT_URL", "http://127.0.0.1:9/")

    def make(name: str, *settings: str) -> list[str]:
        return [
            *(sys.executable, "-m", "dovetail", "train", str(config)),
            *(f"experiment={name}", "trainer.save_every=1"),
            *("data.val_files=[]", "trainer.samples_per_step=-1"),
            *(f"trainer.copy_to={config.parent / 'bucket'}", *settings),
        ]

    return make


def until(met: Callable[[], object], supervisor: subprocess.Popen[str]) -> bool:
    """Wait for a condition; false where the run ends before."""
    end = time.monotonic() + WAIT
    while not met():
        if supervisor.poll() is not None:
            return False
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return True


def driver_of(run: Path) -> psutil.Process | None:
    """The process that trains now, where there is one."""
    try:
        process = psutil.Process(json.loads((run / "run.json").read_text())["process"])
        return process if process.is_running() else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def test_a_supervised_run_whose_process_is_killed_ends_as_one_that_was_not(
    command: Callable[..., list[str]], config: Path
) -> None:
    runs = config.parent / "runs" / "tests"
    epochs = f"trainer.total_epochs={STEPS // 3}"
    subprocess.run(command("undisturbed", epochs), check=True)
    run = runs / "killed"
    with subprocess.Popen(
        command("killed", epochs), stderr=subprocess.PIPE, text=True
    ) as supervisor:
        for step in (2, 4):
            metrics = run / "metrics.jsonl"
            assert until(
                lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(),  # noqa: B023
                supervisor,
            )
            driver = driver_of(run)
            assert driver is not None
            driver.kill()
        said = supervisor.communicate(timeout=WAIT)[1]
        assert supervisor.returncode == 0, said
    assert differing(left_by(runs / "undisturbed"), left_by(run)) == []
    assert set(prompts_used(run).values()) == {1}
    rows = [json.loads(line) for line in (run / "restarts.jsonl").read_text().splitlines()]
    assert [(row["cause"], row["exit_code"]) for row in rows] == [("killed by SIGKILL", 137)] * 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == 2
    assert summary["steps_repeated"] == sum(row["step"] - row["from_step"] for row in rows)
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == [
        path.name for path in sorted((config.parent / "bucket/tests/killed").glob("step_*"))
    ]
    assert "restart 2 of at most 100" in said


def test_an_error_of_the_user_is_not_tried_again(
    command: Callable[..., list[str]], config: Path
) -> None:
    (config.parent / "my_reward.py").write_text("def compute_score(:\n")
    done = subprocess.run(command("wrong"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "SyntaxError" in done.stderr
    assert "restart" not in done.stderr
