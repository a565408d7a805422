"""Reading of training states without the engine, as another program would."""

from __future__ import annotations

import numpy as np
from trained_engines import stored_tensors

from dovetail.metrics import values
from dovetail.plugins import objective_spec


def kept(engine, directory):
    """Save an engine's state; its float32 weights by name, whole."""
    engine.save(directory).result()
    return stored_tensors(directory / "weights")


def critic_norm(critic, batch):
    """Let a critic make two updates towards random returns; its gradient's norm in the second."""
    column = critic.forward(batch, frozenset({"values"})).result()["values"]
    given = np.random.default_rng(2).normal(size=len(column.values)).astype(np.float32)
    columns = {"values": column, "returns": column.with_values(given)}
    spec = objective_spec("value", clip=None)
    for _ in range(2):
        metrics = values(critic.update(batch.with_columns(columns), spec).result())
    return metrics["critic/grad_norm"]
