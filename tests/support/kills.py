"""What the tests that kill runs share: where a run can be killed, and all that a run leaves, to compare bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

Kill = tuple[str, int, str]
"""The function, which call of it, and `before` or `after`."""

_STORE = "dovetail.checkpoint.store:CheckpointStore"
_SYNC = "dovetail_rollouts.weight_sync:WeightSync"
_WRITER = "dovetail_torch_engines.safetensors_files:SafetensorsWriter"

POINTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "rollout": (("dovetail_rollout_hf.scheduler:Scheduler._deliver", "before"),),
    "scoring": (("dovetail_rewards.managers.naive:NaiveManager._run", "before"),),
    "update": (
        ("dovetail_train_fsdp2.engine:Fsdp2Engine.update", "before"),
        ("dovetail_train_fsdp2.engine:Fsdp2Engine.update", "after"),
    ),
    "publishing weights": ((f"{_SYNC}._transfer", "before"), (f"{_SYNC}._transfer", "after")),
    "end of a step": (("dovetail.run.record:RunRecord._finish", "after"),),
    "asynchronous saving": (
        ("dovetail_train_fsdp2.checkpoint:_write", "before"),
        ("dovetail_train_fsdp2.checkpoint:_write", "after"),
        (f"{_STORE}._seal", "after"),
    ),
    "pointer swap": (
        (f"{_STORE}._point", "before"),
        (f"{_STORE}._point", "after"),
        (f"{_STORE}._mend_best", "before"),
    ),
    "retention": ((f"{_STORE}._retire", "before"), (f"{_STORE}._remove_all", "after")),
    "export": (
        ("dovetail.run.checkpoints:write_whole", "before"),
        (f"{_WRITER}._write", "before"),
        (f"{_WRITER}.finish_model", "after"),
        ("dovetail.run.checkpoints:write_whole", "after"),
    ),
    "requeue": (
        ("dovetail.run.run:newest_whole", "after"),
        ("dovetail_train_fsdp2.engine:Fsdp2Engine.load", "after"),
        ("dovetail.run.checkpoints:RunCheckpoints.restore", "after"),
    ),
}

_OF_THE_SITTING = re.compile(
    r"time$|(time|perf|weight_check|weight_sync)/|.*/(rss_bytes|max_memory_\w+|restarts)$|.*_seconds$"
    r"|rollout/(generated|prefill)_tokens$"
)
"""Metrics that tell how long this process took, what memory it used, of its own checks of weights that it sent, and of replicas that it
started again: the process that a test kills may be one. A replica that is killed takes its counters of tokens along."""


def left_by(run: Path) -> dict[str, str]:
    """Return all that a finished run left, by a name: weights and moments of its checkpoints and of its model, states, metrics
    and samples of every step.
    """
    found: dict[str, str] = {}
    for name, text in _left_by(run):
        # A run that was killed after its last checkpoint validates once more, with the same weights.
        assert found.get(name, text) == text, f"{name} is there twice"
        found[name] = text
    return found


def _left_by(run: Path) -> Iterator[tuple[str, str]]:
    yield "hidden", str(sorted(path.name for path in run.rglob(".*") if path.name != ".lock"))
    for name in ("checkpoints/latest", "checkpoints/best"):
        if (run / name).exists():
            yield name, (run / name).read_text().replace(str(run), "RUN")
    for folder in (*(run / "checkpoints").glob("step_*"), run / "final"):
        for file in (path for path in folder.rglob("*") if path.is_file()):
            yield from _in_file(file, str(file.relative_to(run)))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {name: value for name, value in row.items() if not _OF_THE_SITTING.match(name)}
        if kept.keys() != {"step"}:
            part = "validation" if any(name.startswith("val/") for name in kept) else "training"
            yield f"metrics of step {row['step']}, {part}", json.dumps(kept, sort_keys=True)
    for file in (run / "samples").glob("*.jsonl"):
        yield file.name, _digest(file.read_bytes())
    summary = json.loads((run / "summary.json").read_text())
    yield "summary", str([summary["status"], summary["steps"]])


def _in_file(file: Path, name: str) -> Iterator[tuple[str, str]]:
    if file.suffix == ".safetensors":
        for tensor, value in load_file(file).items():
            yield f"{name}: {tensor}", f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    elif file.name == "state.json":
        yield name, _state(json.loads(file.read_text()))
    elif file.name not in ("manifest.json", "README.md"):  # the card names the run's folder
        yield name, _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _state(document: dict[str, Any]) -> str:
    """A resumed process sends weights once more before its first step, as another version of them."""
    del document["run"]["train_seconds"], document["plugins"]["actor_weights"]["version"]
    return json.dumps(document, sort_keys=True)


def prompts_used(run: Path) -> Counter[tuple[int, int]]:
    """Count in how many steps each prompt of each epoch was trained on, by the samples of the steps: (epoch, prompt)."""
    used: Counter[tuple[int, int]] = Counter()
    for file in (run / "samples").glob("step_*.jsonl"):
        ids = [json.loads(line)["sample_id"] for line in file.read_text().splitlines()]
        found = [re.match(r"train\.e(\d+)\.p(\d+)", name) for name in ids]
        used.update({(int(match[1]), int(match[2])) for match in found if match is not None})
    return used


def killed_at_random(
    start: Callable[..., Any],
    command: Sequence[str],
    *,
    kills: int,
    seconds: float,
    between: Callable[[random.Random], None] = lambda chance: None,
) -> Iterator[str]:
    """Yield the names of finished runs, each started again until it finishes, with so many kills over all of them.

    A kill comes within `seconds`, what a run takes; `between` is called after each end of a process.
    """
    chance, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        name, status = f"killed_{runs}", -signal.SIGKILL
        while status:
            sitting = start(*command, f"experiment={name}")
            until = time.monotonic() + chance.uniform(0, 1.05 * seconds)
            while killed < kills and time.monotonic() < until and not sitting.ended:
                time.sleep(0.005)
            if killed < kills:
                sitting.send(signal.SIGKILL)
            done = sitting.wait()
            status = done.returncode
            assert status in (0, -signal.SIGKILL), done.stdout + done.stderr
            killed += status != 0
            between(chance)
        yield name
        runs += 1
