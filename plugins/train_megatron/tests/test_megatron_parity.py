"""Every layout computes the same as plain transformers and torch: scores, loss, gradient norm, and the updated weights.

In float32 on the CPU, with a stand-in for CUDA; tolerances are float32 rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.metrics import values

LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 without sequence parallelism": {"tensor_parallel_size": 2, "sequence_parallel": False},
    "pp2": {"pipeline_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2, computing again": {"tensor_parallel_size": 2, "gradient_checkpointing": True},
    "pp2, computing again": {"pipeline_parallel_size": 2, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_update_is_that_of_plain_transformers(
    two, on_ranks, tiny, batch, objective, plain, tmp_path, layout
):
    engine = on_ranks(two, tiny, **layout)
    names = frozenset({"log_probs", "entropies", "sum_pi_squared"})
    scores = engine.forward(batch, names).result()
    metrics = values(engine.update(batch, objective).result())
    engine.export(tmp_path / "out").result()
    loss, norm, expected, weights = plain(tiny, batch)
    for name in names:
        np.testing.assert_allclose(scores[name].values, expected[name], atol=2e-5)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(exported, weights, atol=5e-5, rtol=1e-4)
