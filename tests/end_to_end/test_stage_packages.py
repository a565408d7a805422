"""A package outside of the tree brings stages and a trainer: it is built, listed, planned, trained with and checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from run_files import lines_of, steps_of

from dovetail.plugins.index import default_index

STAGES = {"bonus", "add_bonus", "clip_advantages", "length_limit"}
CLIPPED = 0.5
"""Largest advantage."""
READER = """
import numpy as np
from dovetail.interfaces import Stage


class Reader(Stage):
    name = "reader"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def requires(cls, config, facts):
        return {"old_log_probs", "entropies", "sum_pi_squared"}

    def run(self, batch, step):
        step.metrics["reader/entropy"] = float(batch["entropies"].values.mean())
        return batch
"""
COUNTED = """
import json, sys, traceback
import dovetail
from dovetail_runtime_ray.store import RayStore

fetch, fetches = RayStore.get, []


def counted(self, references):
    frames = traceback.extract_stack()
    if any(f.filename.endswith("run/learner.py") and f.name == "learn" for f in frames):
        named = [f.filename.rpartition("/")[2] for f in frames if f.name == "run"]
        fetches.append((named[-1], len(references)))
    return fetch(self, references)


RayStore.get = counted
dovetail.train(sys.argv[1], sys.argv[2:])
print(json.dumps(fetches))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(install_wheel: Callable[[Path], Path]) -> Path:
    """A folder in which the wheel of the package is installed."""
    return install_wheel(Path(__file__).parent / "stage_packages" / "stagekit")


@pytest.fixture(autouse=True)
def visible(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts see the package."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def here(
    site: Path, inside: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Run the command line in this process, which sees the package, too."""
    monkeypatch.syspath_prepend(str(site))
    default_index.cache_clear()
    yield inside
    default_index.cache_clear()


@pytest.fixture
def staged(config: Path) -> Path:
    """A config that names three of the stages and the trainer."""
    document = yaml.safe_load(config.read_text())
    document["rollout"]["stop_token_ids"] = list(range(30))  # so that most responses end early
    document["algorithm"]["stages"] = [
        "add_bonus",
        {"name": "clip_advantages", "bound": CLIPPED},
        {"name": "length_limit", "max_mean": 12},
    ]
    document["trainer"] = {
        "name": "sparse",
        "validate_every": 1,
        "validate_before": False,
        "validate_after": False,
    }
    config.write_text(yaml.safe_dump(document))
    return config


def table(printed: str) -> dict[str, list[str]]:
    """The cells of each line by its second word: rows of the table of stages, which start with their phase."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    return {row[1]: row for row in rows if len(row) == 4}


def test_the_plan_puts_its_stages_into_their_phases_with_the_versions_that_they_read(
    here: Callable[..., Result], staged: Path
) -> None:
    overlong = "algorithm.overlong_penalty.buffer=4"
    printed = here("plan", str(staged), overlong, "--columns").stdout
    rows = table(printed)
    order = list(rows)
    assert {name: rows[name][0] for name in STAGES} == {
        "bonus": "transform",
        "add_bonus": "transform",
        "clip_advantages": "estimate",
        "length_limit": "check",
    }
    assert order.index("bonus") < order.index("add_bonus") < order.index("overlong_penalty")
    assert order.index("advantage") < order.index("clip_advantages") < order.index("update_actor")
    assert rows["add_bonus"][2:] == ["controller; stagekit", "algorithm.stages[0]"]
    assert "stagekit.bonus required by" in rows["bonus"][3]
    assert "'add_bonus'" in rows["bonus"][3]
    columns = {
        row[0]: row[1:]
        for line in printed.splitlines()
        if len(row := re.split(r"\s{2,}", line.strip())) == 3
    }
    assert columns["bonus"] == ["finish_reason 1", "stagekit.bonus 1"]
    assert columns["add_bonus"] == [
        "response_mask 1, scores 1, stagekit.bonus 1, token_rewards 1",
        "scores 2, token_rewards 2",
    ]
    assert "scores 2" in columns["overlong_penalty"][0]
    assert "scores 3" in columns["advantage"][0]
    assert columns["clip_advantages"] == ["advantages 1", "advantages 2"]


def test_it_trains_with_them(dovetail: Run, staged: Path, tmp_path: Path) -> None:
    dovetail("train", str(staged))
    run = tmp_path / "runs" / "tests" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    metrics = lines_of(run / "metrics.jsonl")
    assert [row["step"] for row in metrics if "time/validation" in row] == [1, 2]
    trained = {row["step"]: row for row in metrics if "time/step" in row}
    assert list(trained) == [1, 2, 3]
    seen = lines_of(run / "stages.jsonl")
    for step, row in trained.items():
        assert {f"time/{name}" for name in STAGES} <= row.keys()
        changed = {line["stage"]: line for line in seen if line["step"] == step}
        assert changed["length_limit"]["changed"] == []
        assert changed["bonus"]["changed"] == ["stagekit.bonus"]
        assert changed["add_bonus"]["changed"] == ["scores", "token_rewards"]
        assert changed["clip_advantages"]["changed"] == ["advantages"]
        added = changed["add_bonus"]["score"] - changed["bonus"]["score"]
        assert 0 < row["stagekit/bonus"] <= 0.1
        assert added == pytest.approx(row["stagekit/bonus"], rel=1e-4)
    lock = json.loads((run / "plugins.lock.json").read_text())["plugins"]
    ours = {f"{p['kind']}/{p['name']}" for p in lock if p.get("distribution") == "stagekit"}  # fmt: skip
    assert ours == {"trainer/sparse", *(f"stage/{name}" for name in STAGES)}


@pytest.mark.parametrize(
    ("stages", "facts"),
    [
        # The largest number of a config, which float32 rounds to infinity.
        ("[{name: bonus, amount: 3.4028236e38}, add_bonus]", ["stagekit.bonus", "not finite"]),
        ("[{name: length_limit, max_mean: 0.5}]", ["the mean response", "at most 0.5"]),
    ],
    ids=["a bonus that is not a number", "responses above the limit"],
)
def test_a_step_that_its_stages_refuse_changes_no_weight(
    here: Callable[..., Result], staged: Path, tmp_path: Path, stages: str, facts: list[str]
) -> None:
    done = here("train", str(staged), f"algorithm.stages={stages}", check=False)
    assert done.exit_code == 3, done.output
    run = tmp_path / "runs" / "tests" / "run"
    assert [fact for fact in facts if fact not in done.stderr] == []
    [sample, *_] = json.loads((run / "faults" / "step_1.json").read_text())["sample_ids"]
    assert sample in done.stderr or "faults/step_1.json" in done.stderr
    ran = {line["stage"] for line in lines_of(run / "stages.jsonl")}
    assert not ran & {"add_bonus", "length_limit", "update_actor"}
    assert not any("actor/loss" in row for row in lines_of(run / "metrics.jsonl"))
    assert not list(run.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    "plugin",
    [
        "trainer/one_step_off",
        pytest.param("stage/add_bonus", marks=pytest.mark.nightly),
        pytest.param("trainer/sparse", marks=pytest.mark.nightly),
        pytest.param("stage/clip_advantages", marks=pytest.mark.nightly),
    ],
)
def test_they_pass_the_conformance_suites(dovetail: Run, plugin: str) -> None:
    done = dovetail("plugins", "check", plugin, "--json", check=False)
    report = json.loads(done.stdout)
    left = [item for item in (*report["checks"], *report["tests"]) if item["outcome"] == "failed"]
    assert left == []
    assert len(report["tests"]) > 10
    assert report["tier"] in ("gold", "platinum"), report["facts"]


@pytest.mark.parametrize("offload", ["false", pytest.param("true", marks=pytest.mark.nightly)])
def test_responses_that_are_cut_short_go_on_under_new_weights_and_from_a_checkpoint(
    dovetail: Run, config: Path, tmp_path: Path, offload: str
) -> None:
    ahead = ("trainer.name=one_step_off", "trainer.save_every=1", f"rollout.offload={offload}")
    long = (
        "rollout.partial_rollout=true",
        "rollout.ignore_eos=true",
        "data.max_response_length=240",
    )
    few = ("rollout.max_batch_size=6", "data.val_files=[]")
    dovetail("train", str(config), *ahead, *long, *few)
    run = tmp_path / "runs" / "tests" / "run"
    steps = steps_of(run)
    rows = [row for n in (1, 2, 3) for row in lines_of(run / f"samples/step_{n}.jsonl")]
    assert {row["response_length"] for row in rows} == {240}
    assert len({row["sample_id"] for row in rows}) == len(rows) == 3 * 4 * 4
    assert all(row["rollout/staleness_max"] <= 1 for row in steps)
    if offload == "false":
        assert max(row["rollout/partial_share"] for row in steps) > 0
        state = json.loads((run / "checkpoints" / "step_1" / "state.json").read_text())
        kept = state["plugins"]["source"]
        assert "cut" in {response["is"] for response in kept["responses"]}
        for late in (2, 3):
            shutil.rmtree(run / "checkpoints" / f"step_{late}")
        done = dovetail("resume", str(run))
        again = [row for n in (2, 3) for row in lines_of(run / f"samples/step_{n}.jsonl")]
        assert {row["response_length"] for row in again} == {240}, done.stdout
        assert [r["sample_id"] for r in again] == [r["sample_id"] for r in rows[16:]]


@pytest.mark.ray
def test_on_ray_the_controller_fetches_what_a_stage_reads_and_nothing_else(
    staged: Path, tmp_path: Path
) -> None:
    (tmp_path / "reader.py").write_text(READER)
    (tmp_path / "counted.py").write_text(COUNTED)
    reader = f"{{path: {tmp_path}/reader.py, attribute: Reader}}"
    overrides = [
        *("runtime.name=ray", "runtime.workers_per_node=2", "trainer.total_steps=2"),
        f"algorithm.stages=[add_bonus, clip_advantages, length_limit, {reader}]",
        # Three columns of these tokens are more than goes along with a result.
        *("data.train_batch_size=6", "rollout.n=16", "data.max_response_length=128"),
        *("rollout.stop_token_ids=[]", "rollout.ignore_eos=true", "data.val_files=[]"),
        # Else the check reads what it compares.
        "algorithm.logprob_check.every=0",
    ]
    done = subprocess.run(
        [sys.executable, "counted.py", str(staged), *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "tests" / "run"
    seen = [line["stage"] for line in lines_of(run / "stages.jsonl") if line["step"] == 2]
    assert {"score_actor", "reader", "add_bonus", "clip_advantages", "update_actor"} <= set(seen)
    fetches = json.loads(done.stdout.splitlines()[-1])
    assert fetches == [["reader.py", 2]] * 2  # the part of each worker, in each step
