"""Compiled layers: the same gradients, and a few versions of their code however many lengths a run brings."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dovetail_train_fsdp2 import layers
from dovetail_train_fsdp2.config import Fsdp2Config

PIECES = {"never": 1, "always": 4}
"""Of a layer's code: packed, it is cut where attention looks at the lengths."""
VERSIONS = 2
"""Of a piece at most, for all layers and all lengths together."""


@pytest.fixture
def counter(monkeypatch):
    """Counts the versions that are made; they run as traced, without a compiler's minute."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(layers, "BACKEND", counting)
    monkeypatch.setattr(layers, "TOKENS_AT_LEAST", 8)
    yield counting
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("packing", "recompute"),
    [
        pytest.param("never", True, marks=pytest.mark.nightly),
        ("always", False),
        pytest.param("never", False, marks=pytest.mark.nightly),
        pytest.param("always", True, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_the_same_for_any_number_of_tokens(
    tiny, make_engine, gradients, new_batch, objective, counter, packing, recompute
):
    given = {"packing": packing, "share_prompts": "never", "gradient_checkpointing": recompute}
    plain = make_engine(tiny, budget=60, config=Fsdp2Config(**given))
    compiled = make_engine(tiny, budget=60, config=Fsdp2Config(**given, compile=True))
    # The first length makes a version, the second one for any length, and a third none.
    for seed in range(3):
        batch = new_batch(seed)
        expected, _ = gradients(plain, batch, objective)
        found, _ = gradients(compiled, batch, objective)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert 0 < counter.frame_count <= VERSIONS * PIECES[packing]


def test_scoring_and_probing_make_few_versions(tiny, make_engine, new_batch, counter):
    engine = make_engine(
        tiny, budget=60, config=Fsdp2Config(packing="never", share_prompts="never", compile=True)
    )
    for seed in range(3):
        engine.forward(new_batch(seed), frozenset({"log_probs"}))
    assert 0 < counter.frame_count <= VERSIONS


def test_prompts_in_a_cache_are_left_uncompiled(tiny, make_engine, new_batch, counter):
    config = Fsdp2Config(packing="never", share_prompts="always", compile=True)
    make_engine(tiny, config=config).forward(new_batch(), frozenset({"log_probs"}))
    assert counter.frame_count == 0
