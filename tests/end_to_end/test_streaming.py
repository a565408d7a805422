"""The trainer `streaming` on a tiny model: on-policy bit for bit without staleness, and what a run says of staleness."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dovetail.config import load_config
from dovetail.errors import ConfigError
from dovetail.run.run import resume, train

CLOCKS = ("time", "perf/", "rollout/idle_seconds", "actor/rss_bytes")
"""Beginnings of the metrics that differ from run to run."""


def run(config: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Train; return what each step reports."""
    train(config, [f"experiment={name}", *overrides])
    return steps_of(config, name)


def steps_of(config: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory(config, name) / "metrics.jsonl").open()]
    return [row for row in rows if "time/step" in row]


def directory(config: Path, name: str) -> Path:
    return config.parent / "runs" / "tests" / name


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows]


def run_on_ray(config: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Train in two processes; return what each step reports."""
    command = [sys.executable, "-m", "dovetail", "train", str(config), f"experiment={name}"]
    command += ["runtime.name=ray", "runtime.workers_per_node=2", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=config.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 CPU processes: actor (dp=2), rollout × 2" in done.stdout
    return steps_of(config, name)


@pytest.mark.parametrize(
    "train_",
    [run, pytest.param(run_on_ray, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
    ids=["one process", "two Ray workers"],
)
def test_without_staleness_it_is_on_policy_bit_for_bit(config: Path, train_: Any) -> None:
    quick = ("trainer.save_every=0", "trainer.validate_before=false")
    expected = train_(config, "on_policy", *quick)
    found = train_(config, "streaming", "trainer={name: streaming, max_staleness: 0}", *quick)
    for row, other in zip(without_clocks(found), without_clocks(expected), strict=True):
        assert {k: (v, other[k]) for k, v in row.items() if v != other[k]} == {}
        assert row.keys() == other.keys()
    assert len(found) == 3
    one, other = (
        load_file(directory(config, name) / "final" / "model.safetensors")
        for name in ("on_policy", "streaming")
    )
    assert one.keys() == other.keys()
    for name, weight in one.items():
        np.testing.assert_array_equal(other[name], weight)
    samples = [directory(config, name) / "samples" for name in ("on_policy", "streaming")]
    for step in (1, 2, 3):
        first, second = ((folder / f"step_{step}.jsonl").read_text() for folder in samples)
        assert first == second


@pytest.mark.parametrize(
    ("on_sync", "over_sampling", "queued"),
    [
        pytest.param("drain", "null", 12, marks=pytest.mark.nightly),
        ("abort", "1.5", 6),
        ("keep", "null", 12),
    ],
)
def test_a_run_with_staleness_uses_every_prompt_once_and_says_how_old_its_tokens_are(
    config: Path, on_sync: str, over_sampling: str, queued: int
) -> None:
    trainer = (
        f"{{name: streaming, max_staleness: 2, on_sync: {on_sync}, over_sampling: {over_sampling}, "
        "validate_before: false}"
    )
    rows = run(config, on_sync, f"trainer={trainer}", "trainer.total_epochs=2")
    assert len(rows) == 6
    for row in rows:
        assert 0 <= row["rollout/staleness_mean"] <= row["rollout/staleness_p95"] <= 2
        assert row["rollout/staleness_max"] <= 2
        shares = [v for k, v in row.items() if k.startswith("rollout/staleness_share_")]
        assert sum(shares) == pytest.approx(1)
        assert 0 < row["rollout_corr/weight_ess"] <= 1
        assert row["rollout/idle_seconds"] >= 0
        assert row["rollout/ready"] <= row["rollout/queued"] <= queued
        assert row["rollout/passed_over"] <= queued - 4
    assert max(row["rollout/staleness_max"] for row in rows) > 0
    assert rows[0]["rollout/queued"] == queued


@pytest.mark.nightly
def test_over_a_run_what_its_trainer_set_follows_another_on_sync_and_what_was_given_stays(
    config: Path,
) -> None:
    trainer = "trainer={name: streaming, on_sync: abort, total_steps: 1, validate_before: false}"
    run(config, "first", trainer, "rollout.keep_cache=false")
    stored, said = directory(config, "first"), list[str]()
    resume(stored, ["trainer.on_sync=drain", "trainer.total_steps=2"], say=said.append)
    assert said.pop().startswith(f"{stored}: continues from step_1, saved ")
    assert said == [
        "changed: rollout.partial_rollout: true → false",
        "changed: trainer.total_steps: 1 → 2",
        'changed: trainer.on_sync: "abort" → "drain"',
    ]
    assert len(steps_of(config, "first")) == 2
    with pytest.raises(
        ConfigError, match=r"rollout.keep_cache = false contradicts trainer.on_sync = keep"
    ):
        resume(stored, ["trainer.on_sync=keep", "trainer.total_steps=3"])
    on_policy = load_config(stored / "config.yaml", ["trainer=on_policy"]).config
    assert on_policy.algorithm.rollout_correction is None
