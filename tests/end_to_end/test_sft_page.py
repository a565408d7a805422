"""The configs that docs/sft.md shows run as they stand, one after the other, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(300)
def test_a_model_is_fine_tuned_and_then_trained_with_grpo(
    root: Path, config: Path, tiny: Path, tmp_path: Path, inside: Callable[..., Any]
) -> None:
    page = (root / "docs" / "sft.md").read_text()
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    rows = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert rows is not None
    lines = [json.loads(line) for line in rows[1].splitlines()]
    for number, row in enumerate(lines):
        (tmp_path / f"form_{number}.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    common = [f"output_dir={tmp_path}/runs", "model.dtype=float32"]
    for number in range(len(lines)):
        inside(
            *("sft", str(tmp_path / "sft.yaml"), *common, f"model.path={tiny}"),
            *(f"experiment=sft_{number}", f"data.train_files={tmp_path}/form_{number}.jsonl"),
            f"data.val_files={tmp_path}/form_{1 - number}.jsonl",
            *("data.train_batch_size=4", "actor.optim.warmup_steps=0", "actor.optim.lr=1e-2"),
        )
    run = tmp_path / "runs" / "gsm8k" / "sft_0"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val/loss"] for row in metrics if "val/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    data = [
        *(f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl"),
        *("data.train_batch_size=4", "data.max_response_length=8", "trainer.total_steps=1"),
    ]
    reward = f"reward.function.path={tmp_path}/my_reward.py"
    inside(
        *("train", str(tmp_path / "grpo.yaml"), *common, *data, reward),
        f"model.path={run}/final",
    )
    summary = json.loads((tmp_path / "runs" / "gsm8k" / "grpo" / "summary.json").read_text())
    assert summary["status"] == "completed"
