"""What a run left in its directory: lines of its files, and tensors of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where it is absent."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as rows:  # `splitlines` would split responses, too
        return [json.loads(row) for row in rows]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What each training step reported."""
    return [row for row in lines_of(run / "metrics.jsonl") if "time/step" in row]


def tensors_of(
    run: Path, step: int, part: str = "weights", role: str | None = None
) -> dict[str, np.ndarray]:
    """Every weight, or moment, in a checkpoint: of all roles by role and name, of one role by name."""
    folder = run / "checkpoints" / f"step_{step}"
    return {
        name if role else f"{file.relative_to(folder).parts[0]}/{name}": value
        for file in sorted(folder.glob(f"{role or '*'}/{part}/*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
