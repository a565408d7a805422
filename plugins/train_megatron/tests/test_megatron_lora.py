"""Low-rank adapters: in any layout they compute the same as peft on plain transformers, and the base does not change.

In float32 on the CPU, with a stand-in for CUDA; tolerances are float32 rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_loss import loss_of
from training_states import kept

from dovetail.metrics import values
from dovetail.plugins import plugin_section
from dovetail_torch_engines import LoraSection

pytest.importorskip("peft")
SECTION = LoraSection(rank=4, alpha=8.0)
SOME = LoraSection(rank=4, rank_stabilised=True, target_modules=("q_proj", "v_proj", "up_proj"))
DORA = LoraSection(rank=4, alpha=8.0, dora=True)
SOME_DORA = LoraSection(rank=4, dora=True, target_modules=("q_proj", "v_proj", "down_proj"))
BOTH = frozenset({"log_probs", "ref_log_probs"})
TP, PP, CP = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "context"))
LAYOUTS = {
    "tp2": (TP, SECTION),
    "pp2": (PP, SOME),
    "cp2": (CP, SECTION),
    "dp2": ({}, SECTION),
    "tp2 without sequence parallelism": ({**TP, "sequence_parallel": False}, SECTION),
    "tp2, some layers": (TP, SOME),
    "tp2, magnitudes": (TP, DORA),
    "tp2, magnitudes without sequence parallelism": ({**TP, "sequence_parallel": False}, SOME_DORA),
    "pp2, magnitudes": (PP, SOME_DORA),
    "tp2, computing again": ({**TP, "gradient_checkpointing": True}, SECTION),
    "pp2, computing again": ({**PP, "gradient_checkpointing": True}, SECTION),
}
FOUR = {
    "tp2 x pp2": ({**TP, **PP}, SECTION),
    "dp2 x tp2": (TP, SECTION),
    "tp2 x cp2": ({**TP, **CP}, SOME),
}


def peft_model(path, section):
    """The oracle's model: a peft adapter on plain transformers."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    every = section.target_modules == ("all-linear",)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        use_rslora=section.rank_stabilised,
        use_dora=section.dora,
        target_modules="all-linear" if every else list(section.target_modules),
    )
    return inject_adapter_in_model(config, model)


def updated_by_peft(path, section, start, batch, steps):
    """Losses and norms of some updates of a peft adapter, the scores before them, and the matrices after them."""
    model = peft_model(path, section)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(start[name])
    optim = plugin_section("optimizer", "adamw")
    adam = torch.optim.AdamW(
        trained.values(), lr=1e-2, betas=optim.betas, eps=1e-3, weight_decay=optim.weight_decay
    )
    losses, norms, scores = [], [], []
    for _ in range(steps):
        loss, found = loss_of(model, batch)
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        adam.step()
        losses.append(loss.item())
        scores.append(found["log_probs"].detach().numpy())
    return losses, norms, scores, {name: p.detach() for name, p in trained.items()}


def compare(engine, path, section, batch, objective, tmp_path):
    """See that two updates are peft's, and that the base is the reference before and after them, to the bit."""
    before = engine.forward(batch, BOTH).result()
    np.testing.assert_array_equal(before["ref_log_probs"].values, before["log_probs"].values)
    start = kept(engine, tmp_path / "start")
    metrics, scores = [], []
    for _ in range(2):
        found = engine.forward(batch, frozenset({"log_probs"})).result()
        scores.append(found["log_probs"].values)
        metrics.append(values(engine.update(batch, objective).result()))
    after = engine.forward(batch, BOTH).result()
    np.testing.assert_array_equal(after["ref_log_probs"].values, before["ref_log_probs"].values)
    assert np.abs(after["log_probs"].values - before["log_probs"].values).max() > 1e-2
    losses, norms, expected, matrices = updated_by_peft(path, section, start, batch, 2)
    for i in range(2):
        np.testing.assert_allclose(scores[i], expected[i], atol=3e-5)
        assert metrics[i]["actor/loss"] == pytest.approx(losses[i], rel=1e-4)
        assert metrics[i]["actor/grad_norm"] == pytest.approx(norms[i], rel=1e-4)
    got = kept(engine, tmp_path / "end")
    assert got.keys() == matrices.keys()
    for name, matrix in matrices.items():
        torch.testing.assert_close(got[name], matrix, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "section"),
    [
        pytest.param(*case, id=name, marks=() if name in {"tp2", "pp2"} else pytest.mark.nightly)
        for name, case in LAYOUTS.items()
    ],
)
def test_updates_are_those_of_a_peft_adapter(
    two, on_ranks, tiny, batch, objective, tmp_path, layout, section
):
    engine = on_ranks(two, tiny, lora=section, **layout)
    compare(engine, tiny, section, batch, objective, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "section"), FOUR.values(), ids=FOUR.keys())
def test_updates_are_those_of_a_peft_adapter_on_two_axes_at_once(
    four, on_ranks, tiny, batch, objective, tmp_path, layout, section
):
    engine = on_ranks(four, tiny, lora=section, **layout)
    compare(engine, tiny, section, batch, objective, tmp_path)
