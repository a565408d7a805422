"""Samples of a run: `samples/step_N.jsonl` and `samples/validation_N.jsonl`, one sample a line with prompt, response and score."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dovetail.telemetry.jsonl import read_rows

_FILE = re.compile(r"([a-z_]+)_(\d+)\.jsonl")


def samples_path(run_directory: Path, step: int, name: str = "step") -> Path:
    """Where samples of a step are: those trained on (`step`), or those of its validation (`validation`)."""
    return run_directory / "samples" / f"{name}_{step}.jsonl"


def read_samples(run_directory: Path, step: int, name: str = "step") -> list[dict[str, Any]]:
    """The samples of a step; none where none were written."""
    return read_rows(samples_path(run_directory, step, name))


def sample_steps(run_directory: Path, name: str = "step") -> list[int]:
    """The steps that have samples of that name, ascending."""
    return sorted(step for found, step in _files(run_directory) if found == name)


def remove_samples_after(run_directory: Path, step: int) -> None:
    """Remove the samples of later steps, which a resumed run writes anew."""
    for name, later in _files(run_directory):
        if later > step:
            samples_path(run_directory, later, name).unlink()


def _files(run_directory: Path) -> list[tuple[str, int]]:
    """Name and step of every file of samples."""
    folder = run_directory / "samples"
    if not folder.is_dir():
        return []
    found = (_FILE.fullmatch(path.name) for path in folder.iterdir())
    return [(match[1], int(match[2])) for match in found if match]
