"""The optimizers follow their papers, with the settings of their configs."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail.plugins import plugin_section
from dovetail_torch_engines import build_optimizer, hidden_matrices


def stepped(name, start, gradients, **settings):
    """Return a parameter after steps with these gradients, float64 arrays."""
    parameter = nn.Parameter(torch.from_numpy(start).float())
    section = plugin_section("optimizer", name, **settings)
    optimizers = build_optimizer(section).build({"w": parameter}, {"w"})
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).float()
        for optimizer in optimizers:
            optimizer.step()
    return parameter.detach().double().numpy()


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 10)), rng.normal(size=(4, 6, 10))


def test_adamw_is_the_papers(arrays):
    start, gradients = arrays
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        w -= 0.1 * 0.3 * w + 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
    found = stepped(
        "adamw", start, gradients, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3
    )
    np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_sums_gradients_with_momentum(arrays, nesterov):
    start, gradients = arrays
    w, b = start.copy(), np.zeros_like(start)
    for g in gradients:
        decayed = g + 0.3 * w
        b = 0.9 * b + decayed
        w = w - 0.1 * (decayed + 0.9 * b if nesterov else b)
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.3}
    np.testing.assert_allclose(stepped("sgd", start, gradients, **settings), w, rtol=1e-5)


def test_adafactor_is_the_papers(arrays):
    start, gradients = arrays
    w, rows, columns = start.copy(), np.zeros((6, 1)), np.zeros((1, 10))
    for t, g in enumerate(gradients, start=1):
        decay = t**-0.7
        rows += decay * ((g**2).mean(1, keepdims=True) - rows)
        columns += decay * ((g**2).mean(0, keepdims=True) - columns)
        u = g / np.sqrt(rows * columns / rows.mean())
        size = max(0.05, np.sqrt((w**2).mean())) * min(0.1, t**-0.5)
        w = w * (1 - 0.1 * 0.3) - size * u / max(1, np.sqrt((u**2).mean()) / 1.5)
    settings = {
        "lr": 0.1, "beta2_decay": -0.7, "min_scale": 0.05, "clip": 1.5, "weight_decay": 0.3,
    }  # fmt: skip
    np.testing.assert_allclose(stepped("adafactor", start, gradients, **settings), w, rtol=1e-4)


@pytest.mark.parametrize(("scale", "factor"), [("match_rms_adamw", 0.2 * 10**0.5), ("original", 1)])
def test_muons_step_is_nearly_orthogonal_and_of_the_scale_that_is_asked_for(arrays, scale, factor):
    start, gradients = arrays
    settings = {"lr": 0.1, "weight_decay": 0.0, "scale": scale}
    step = (start - stepped("muon", start, gradients[:1], **settings)) / (0.1 * factor)
    singular = np.linalg.svd(step, compute_uv=False)
    assert singular.min() > 0.5
    assert singular.max() < 1.3
    # The step U S Vᵀ keeps the gradient's singular vectors U and V.
    u, _, v = np.linalg.svd(gradients[0], full_matrices=False)
    inside = u.T @ step @ v.T
    assert np.abs(inside - np.diag(np.diag(inside))).max() < 0.05


def test_muon_steps_matrices_of_hidden_layers_and_adamw_the_rest():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(8, 4), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
    )
    model["head"].weight = model["embed"].weight
    assert hidden_matrices(model, model["head"]) == {"hidden.weight"}
    section = plugin_section("optimizer", "muon", lr=0.02, adamw_lr=0.003)
    muon, adamw = build_optimizer(section).build(
        dict(model.named_parameters()), hidden_matrices(model, model["head"])
    )
    assert [p is model["hidden"].weight for p in muon.param_groups[0]["params"]] == [True]
    assert len(adamw.param_groups[0]["params"]) == 3
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.02, 0.003)


def test_the_8_bit_optimizer_stays_near_adamw():
    pytest.importorskip("torchao", reason="needs torchao")
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=(64, 128)), rng.normal(size=(5, 64, 128))
    settings = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1}
    with torch.compiler.set_stance("force_eager"):
        found = stepped("adamw_8bit", start, gradients, **settings)
    moved = stepped("adamw", start, gradients, **settings)
    assert np.linalg.norm(found - moved) < 0.05 * np.linalg.norm(moved - start)
    assert (found != moved).any()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("adamw", "betas", betas) for betas in ([1, 0.9], [0.9, 1.0], [-0.1, 0.9], [0.9])),
        ("adamw_8bit", "betas", [1, 1]),
        ("muon", "betas", [1, 1]),
        ("adamw", "eps", 0),
        ("adamw", "weight_decay", -0.1),
        ("adamw", "lr", math.inf),
        ("muon", "adamw_lr", math.nan),
        ("muon", "momentum", 1),
        ("sgd", "momentum", 1),
        ("sgd", "lr", 1e39),
        ("adafactor", "clip", 0.5),
    ],
)
def test_settings_that_no_optimizer_takes_are_refused_with_the_config(name, key, value):
    optim = {"name": name, key: value}
    with pytest.raises(ConfigError, match=rf"actor\.optim\.{key}"):
        config_from_mapping({"model": {"path": "x"}, "actor": {"optim": optim}})
