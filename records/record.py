"""What is recorded of a run directory: series of (step, value) by name, where a value is a number, a text or a digest.

metrics.jsonl            every metric under its name
samples/                 samples/KIND/COLUMN: a digest of that column over the samples of a step, in their order
checkpoints/, the last   checkpoint/ROLE/FOLDER/TENSOR: a digest of dtype, shape and bytes; checkpoint/ROLE/training/…
its state.json           state/…, and ledger/…: how many prompts were used, dropped and left open
summary.json             summary/…
model/                   model/TENSOR, of a preparation
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, Any]]]

MACHINE = (
    *("time", "time/*", "*/train_seconds", "*/time_to_first_token"),
    *("perf/*", "*/tokens_per_second"),
    *("*/rss_bytes", "*/max_memory_*_bytes"),
    "rollout/idle_seconds",
    *("rollout/*/*_requests*", "rollout/*/kv_cache_usage*"),
    "*/directory",
)
"""What depends on the machine: times, throughputs, memory, how many requests an engine was at when it was asked, paths."""
_SAMPLES = re.compile(r"(?!kept_)(\w+)_(\d+)\.jsonl")


def read_run(directory: Path) -> Series:
    """Everything that is recorded of a run directory.

    Raises:
        OSError: a file that every run has is missing.
        ValueError: a file is damaged.
    """
    series: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for name, step, value in _values(directory):
        if not any(fnmatchcase(name, pattern) for pattern in MACHINE):
            series[name].append((step, value))
    return dict(series)


def _values(directory: Path) -> Iterator[tuple[str, int, Any]]:
    for row in _rows(directory / "metrics.jsonl"):
        step = row.pop("step")
        yield from ((name, step, value) for name, value in row.items())
    yield from _samples(directory / "samples")
    yield from _tensors("model", 0, sorted((directory / "model").glob("*.safetensors")))
    checkpoints = directory / "checkpoints"
    if checkpoints.is_dir():
        last = max(checkpoints.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
        yield from _checkpoint(last, int(last.name.split("_")[1]))
    if (summary := directory / "summary.json").exists():
        yield from ((name, 0, value) for name, value in _leaves("summary", _json(summary)))


def _samples(directory: Path) -> Iterator[tuple[str, int, Any]]:
    files = [(match, path) for path in directory.glob("*") if (match := _SAMPLES.match(path.name))]
    for match, path in sorted(files, key=lambda file: (file[0][1], int(file[0][2]))):
        rows, step = _rows(path), int(match[2])
        yield f"samples/{match[1]}/count", step, len(rows)
        for column in sorted({column for row in rows for column in row}):
            text = json.dumps([row.get(column) for row in rows], sort_keys=True)
            yield f"samples/{match[1]}/{column}", step, _digest(text.encode())


def _checkpoint(directory: Path, step: int) -> Iterator[tuple[str, int, Any]]:
    for role in sorted(path for path in directory.iterdir() if path.is_dir()):
        folders: defaultdict[str, list[Path]] = defaultdict(list)
        for file in sorted(path for path in role.rglob("*") if path.is_file()):
            below = file.relative_to(role)
            folders[below.parent.as_posix() if below.parent.parts else file.stem].append(file)
        for folder, files in folders.items():
            name = f"checkpoint/{role.name}/{folder}"
            yield from _tensors(name, step, [f for f in files if f.suffix == ".safetensors"])
            for file in (f for f in files if f.suffix == ".json"):
                yield from ((leaf, step, value) for leaf, value in _leaves(name, _json(file)))
    if (file := directory / "state.json").exists():
        yield from _state(_json(file), step)


def _state(state: dict[str, Any], step: int) -> Iterator[tuple[str, int, Any]]:
    from dovetail.data.ledger import Ledger

    ledger = Ledger()
    ledger.load_state(state.pop("ledger"))
    for part, values in (("ledger", ledger.counts()), ("state", state)):
        yield from ((name, step, value) for name, value in _leaves(part, values))


def _tensors(name: str, step: int, files: Iterable[Path]) -> Iterator[tuple[str, int, Any]]:
    """A digest of every tensor; parts of one tensor in several files count in the order of the files' names."""
    parts: defaultdict[str, list[bytes]] = defaultdict(list)
    for file in files:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
            for tensor, facts in header.items():
                if tensor == "__metadata__":
                    continue
                begin, end = facts["data_offsets"]
                opened.seek(8 + size + begin)
                parts[tensor].append(f"{facts['dtype']} {facts['shape']} ".encode())
                parts[tensor].append(opened.read(end - begin))
    for tensor, pieces in sorted(parts.items()):
        yield f"{name}/{tensor}", step, _digest(*pieces)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value in nested mappings, under the keys that lead to it; lists as their JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key}", item)
    else:
        yield name, json.dumps(value) if isinstance(value, list) else value


def _digest(*pieces: bytes) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
