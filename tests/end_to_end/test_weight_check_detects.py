"""What the weight check detects: replicas that compute with other weights than the trainer's.

Trainer and replica are transformers with two attention kernels, on a model whose predictions spread over several nats.
docs/distributed.md has the same on a pretrained model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.interfaces import Prompt
from dovetail.sections.rollout import WeightCheckSection
from dovetail_rollouts.weight_check import WeightCheck, join_prompts
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

VOCABULARY = 320


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("detects") / "model"
    tiny_model_and_tokenizer(found, vocab_size=VOCABULARY, hidden_size=128, layers=4)
    model: Any = AutoModelForCausalLM.from_pretrained(str(found), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.09)
    model.save_pretrained(str(found))
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def load(directory: Path, dtype: str, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=getattr(torch, dtype), attn_implementation=attention
    )


def score(model: Any, ids_L: np.ndarray) -> np.ndarray:
    """float32 [L − 1]: log-probabilities in nats."""
    ids_1L = torch.from_numpy(ids_L)[None]
    with torch.no_grad():
        log_probs_LV = model(ids_1L).logits[0, :-1].float().log_softmax(-1)
    return np.asarray(log_probs_LV.gather(-1, ids_1L[0, 1:, None])[:, 0].numpy())


def refused(directory: Path, dtype: str, change: Callable[[dict[str, torch.Tensor]], None]) -> bool:
    """Whether the check refuses a replica after `change` has changed its weights, which it gets by name."""
    rng = np.random.default_rng(2)
    prompts = [
        Prompt(index=i, prompt_ids=rng.integers(5, VOCABULARY, 12 + i), raw="") for i in range(40)
    ]
    sequences = join_prompts(prompts, 4, 64, ())
    trainer, replica = (load(directory, dtype, attention) for attention in ("sdpa", "eager"))
    with torch.no_grad():
        change(dict(replica.named_parameters()))
    check = WeightCheck(WeightCheckSection(), sequences, dtype)
    expected = [score(trainer, ids_L) for ids_L in sequences]
    figures, faults = check.compare(
        expected, lambda asked: {0: [score(replica, ids_L) for ids_L in asked]}
    )
    print(dtype, figures)
    return bool(faults)


def step(lr: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Adam's first step moves every weight by the learning rate, up or down."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(7)
        for _, weight in sorted(weights.items()):
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.add_(lr * signs)

    return change


def test_another_attention_kernel_is_not_refused(directory: Path, dtype: str) -> None:
    assert not refused(directory, dtype, lambda weights: None)


@pytest.mark.parametrize("tensor", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"])
def test_two_tensors_swapped_are_detected(directory: Path, dtype: str, tensor: str) -> None:
    def swap(weights: dict[str, torch.Tensor]) -> None:
        one, other = (weights[f"model.layers.{layer}.{tensor}.weight"] for layer in (1, 2))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

    assert refused(directory, dtype, swap)


@pytest.mark.parametrize("tensor", ["self_attn.v_proj", "mlp.up_proj", "input_layernorm"])
def test_a_tensor_of_zeros_is_detected(directory: Path, dtype: str, tensor: str) -> None:
    assert refused(
        directory, dtype, lambda weights: weights[f"model.layers.1.{tensor}.weight"].zero_()
    )


def test_a_version_that_is_one_step_old_is_detected_in_float32_alone(directory: Path) -> None:
    assert refused(directory, "float32", step(1e-5))
    assert not refused(directory, "bfloat16", step(1e-5))
