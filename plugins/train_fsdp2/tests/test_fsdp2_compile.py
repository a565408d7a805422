"""Compiled layers: the same gradients, and few versions of the code for any number of lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dovetail_train_fsdp2 import layers
from dovetail_train_fsdp2.config import Fsdp2Config

PIECES = {"never": 1, "always": 4}
"""Number of compiled pieces of a layer, by packing: packed attention is not traced and divides the code."""
VERSIONS = 2
"""Maximum number of versions of a piece, for all layers and lengths together."""


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
    # The first length compiles a version, the second one a version for any length, the third none.
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
