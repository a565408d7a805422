"""What tests of training engines see of one after updates, whether it is in this process or a group of ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dovetail.batch import Batch
from dovetail.interfaces import WeightSender, WeightTransport


class Kept(WeightTransport, WeightSender):
    """A transport that keeps what was sent last."""

    name = "kept"
    api = ">=1.0,<2"

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}
        self.manifest: Any = None

    def sender(self) -> Any:
        return self

    def receiver(self) -> Any:
        raise NotImplementedError

    def send(self, manifest: Any, tensors: Any) -> None:
        self.manifest = manifest
        self.sent = {name: tensor.clone() for name, tensor in tensors}


def parameters_of(engine: Any, *, trained: bool | None = None) -> dict[str, torch.Tensor]:
    """Copies of the parameters of an engine in this process; where `trained` is given, of those that are or are not."""
    named = engine._runner.model.named_parameters()
    return {n: p.detach().clone() for n, p in named if trained in (None, p.requires_grad)}


def exported(engine: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The engine's weights by name, in the shapes of the model's files."""
    done = engine.export(directory)
    if done is not None:
        done.result()
    return load_file(directory / "model.safetensors")


def updated(engine: Any, batch: Batch, goal: Any, directory: Path, steps: int = 3) -> Any:
    """The metrics of every step, and the weights afterwards."""
    metrics = []
    for _ in range(steps):
        found = engine.update(batch, goal)
        found = found.result() if hasattr(found, "result") else found
        metrics.append({name: metric.value for name, metric in found.items()})
    return metrics, exported(engine, directory)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of one part of a training state by name, whole, read as any other program would."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(tuple(entry.size)) for name, entry in found.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same_metrics(one: Mapping[str, float], other: Mapping[str, float], rel: float) -> None:
    """Check that values are equal but for rounding; figures over no token are NaN on both sides."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = math.isclose(value, other[name], rel_tol=rel, abs_tol=1e-5)
        assert same or (math.isnan(value) and math.isnan(other[name])), name


def assert_same_training(one: Any, other: Any) -> None:
    """Check that what `updated` returned of two engines is the same within float32 rounding."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert_same_metrics(mine, theirs, rel=2e-4)
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=5e-6)
