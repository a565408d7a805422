"""ConstantColumns: stage columns of a dataset's examples that training does not change, computed once and kept in the run directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.interfaces.stage import Stage
from dovetail.planning.plan import Plan
from dovetail.planning.stage_list import PlannedStage

_OF_TOKENS = ("prompt_ids", "response_ids", "response_mask")
"""Columns from which, with the images, the hash that identifies an example is computed."""
_KEY_BYTES = 16


class ConstantColumns:
    """Store of columns that training does not change, such as reference log-probabilities, by stage and example.

    An example is identified by a hash of its tokens, their mask and its images. A stored file is valid only for the same models: equal
    paths, sizes and modification times of the models' files, and equal engine settings.

    Args:
        plan: the plan of the run.
        stages: the stages of the plan, in the plan's order.
        directory: the directory of the stored columns.
    """

    def __init__(self, plan: Plan, stages: Sequence[Stage], directory: Path) -> None:
        self._plan, self._directory = plan, directory
        self.stages: list[tuple[PlannedStage, Stage]] = [
            (planned, stage)
            for planned, stage in zip(plan.stages, stages, strict=True)
            if planned.provides
            and planned.provides == stage.constant(stage.config, plan.facts)
            and not planned.rewrites
        ]
        """Stages whose columns are all constant."""
        self._rows: dict[str, dict[bytes, tuple[np.ndarray, ...]]] = {
            planned.name: {} for planned, _ in self.stages
        }

    @property
    def roles(self) -> frozenset[str]:
        """Roles that only stages with constant columns use; they are not needed once every example's columns are stored."""
        names = self._rows.keys()
        others = (stage.roles for stage in self._plan.stages if stage.name not in names)
        return frozenset(r for planned, _ in self.stages for r in planned.roles).difference(*others)

    def complete(self, stage: str, batch: Batch) -> Batch | None:
        """Return the batch with a stage's stored columns; None unless they are stored for every sample."""
        known = self._rows.get(stage)
        if not known:
            return None
        rows = [known.get(key) for key in _keys(batch)]
        if None in rows:
            return None
        columns: dict[str, Any] = {}
        for place, name in enumerate(self._names(stage)):
            found = [row[place] for row in rows if row is not None]
            ragged = found[0].ndim == 1
            columns[name] = (
                Ragged.from_list(found, dtype=found[0].dtype) if ragged else np.array(found)
            )
        return batch.with_columns(columns)

    def remember(self, stage: str, batch: Batch) -> None:
        """Keep a stage's columns of a batch in memory, if the stage's columns are constant; `fill` writes them to disk."""
        if stage in self._rows:
            columns = [list(batch[name]) for name in self._names(stage)]
            rows = (tuple(map(np.asarray, row)) for row in zip(*columns, strict=True))
            self._rows[stage].update(zip(_keys(batch), rows, strict=True))

    def fill(self, stage: str, batches: Sequence[Batch], compute: Callable[[Batch], Batch]) -> int:
        """Read a stage's stored columns from disk, compute them for batches that lack some, and write the file again if any did.

        Returns:
            The number of batches for which `compute` was called.
        """
        from safetensors import SafetensorError

        path = self._path(stage)
        # If the file can't be read, its columns are computed again.
        with suppress(SafetensorError, OSError, LookupError, ValueError):
            self._read(stage, path)
        missing = [batch for batch in batches if self.complete(stage, batch) is None]
        for batch in missing:
            self.remember(stage, compute(batch))
        if missing:
            self._write(stage, path)
        return len(missing)

    def _names(self, stage: str) -> list[str]:
        return sorted(next(p.provides for p, _ in self.stages if p.name == stage))

    def _path(self, stage: str) -> Path:
        planned = next(planned for planned, _ in self.stages if planned.name == stage)
        facts = self._plan.facts
        parts = [repr(planned.ref), repr(facts.config.model)]
        for model in self._plan.models:
            if model.role in planned.roles:
                parts += [model.path, repr(model.engine), *_files(Path(model.path))]
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
        return self._directory / f"{stage}_{digest}.safetensors"

    def _read(self, stage: str, path: Path) -> None:
        from safetensors.numpy import load_file

        stored = load_file(path)
        columns = []
        for name in self._names(stage):
            values = stored[f"{name}.values"]
            offsets = stored.get(f"{name}.offsets")
            columns.append(list(values) if offsets is None else np.split(values, offsets[1:-1]))
        keys = (row.tobytes() for row in stored["keys"])
        self._rows[stage] = dict(zip(keys, zip(*columns, strict=True), strict=True))

    def _write(self, stage: str, path: Path) -> None:
        from safetensors.numpy import save_file

        rows = self._rows[stage]
        keys = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), _KEY_BYTES)
        stored: dict[str, np.ndarray] = {"keys": keys}
        for place, name in enumerate(self._names(stage)):
            found = [row[place] for row in rows.values()]
            if found[0].ndim == 1:
                lengths = [len(values) for values in found]
                stored[f"{name}.offsets"] = np.concatenate([[0], np.cumsum(lengths)])
                stored[f"{name}.values"] = np.concatenate(found)
            else:
                stored[f"{name}.values"] = np.array(found)
        path.parent.mkdir(exist_ok=True)
        beside = path.with_suffix(".partial")
        save_file(stored, beside)
        beside.replace(path)


def _keys(batch: Batch) -> list[bytes]:
    """Return a hash of each sample's tokens and images."""
    columns: Mapping[str, Any] = {name: list(batch[name]) for name in _OF_TOKENS}
    media = batch["media"] if "media" in batch else [[]] * len(batch)
    keys = []
    for images, *row in zip(media, *columns.values(), strict=True):
        found = hashlib.blake2b(digest_size=_KEY_BYTES)
        for image in images:
            found.update(image["digest"].encode())
        for values in row:
            found.update(len(values).to_bytes(8, "little"))
            found.update(np.ascontiguousarray(values).tobytes())
        keys.append(found.digest())
    return keys


def _files(directory: Path) -> list[str]:
    """Return name, size and modification time of each file in a model's directory, to detect another model; empty without a directory."""
    if not directory.is_dir():
        return []
    found = [(file.name, file.stat()) for file in sorted(directory.iterdir()) if file.is_file()]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]
