"""A run over cached or streamed examples that is killed anywhere, its cache damaged between, ends as the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import killed_at_random
from safetensors.numpy import load_file

ROWS, BATCH, STEPS = 1400, 128, 20
"""Two lots of lines, and more steps than an epoch has."""


def ends_of(run: Path) -> tuple[dict[str, np.ndarray], list[list[str]]]:
    """The weights at the end, and the examples of each step."""
    (weights,) = (run / "final").glob("*.safetensors")
    steps = [
        [json.loads(line)["sample_id"] for line in file.read_text().splitlines()]
        for file in (run / "samples" / f"step_{number}.jsonl" for number in range(1, STEPS + 1))
    ]
    return load_file(weights), steps


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_killed_run_over_cached_data_ends_as_the_undisturbed_one(
    start: Callable[..., Any],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    streaming: str,
) -> None:
    """`DOVETAIL_KILLS=20` kills as often; without it, 4 times."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    wanted = int(os.environ.get("DOVETAIL_KILLS", "4"))
    lines = []
    for i in range(ROWS):
        asked = {"role": "user", "content": f"{i} + 1 ="}
        answer = "" if i in (70, 1200) else str(i + 1)
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": answer}]}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    command = (
        *("train", f"model.path={tiny}", "model.dtype=float32", "trainer.name=supervised"),
        *(f"data.train_files={tmp_path / 'train.jsonl'}", f"data.train_batch_size={BATCH}"),
        *(f"data.streaming={streaming}", "data.shuffle_window=600", "data.max_bad_rows=2"),
        *(f"trainer.total_steps={STEPS}", "trainer.total_epochs=9", "trainer.save_every=3"),
        *("trainer.samples_per_step=-1", "tracking=[jsonl]", f"output_dir={tmp_path / 'runs'}"),
    )
    began = time.monotonic()
    done = start(*command, "experiment=whole").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = time.monotonic() - began
    folder = tmp_path / "runs" / "dovetail"
    expected, examples = ends_of(folder / "whole")
    assert sum(map(len, examples)) == STEPS * BATCH

    def damage(chance: random.Random) -> None:
        for file in (tmp_path / "cache").rglob("*.arrow"):
            if chance.random() < 0.3:
                file.write_bytes(file.read_bytes()[: chance.randrange(999)])

    for name in killed_at_random(start, command, kills=wanted, seconds=seconds, between=damage):
        found, again = ends_of(folder / name)
        assert again == examples
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(value, found[key], err_msg=key)
        lines = (folder / name / "bad_rows.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["row"] for line in lines) == [70, 1200]
