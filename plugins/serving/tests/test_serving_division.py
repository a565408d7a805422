"""The numbers of heads and experts are read from configs of every model family."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from dovetail_serving import experts_of


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (Qwen3MoeConfig(num_experts=12), 12),
        (MixtralConfig(num_local_experts=6), 6),
        (DeepseekV3Config(n_routed_experts=24, num_experts_per_tok=2), 24),
        (Qwen2Config(), 0),
    ],
)
def test_every_family_tells_how_many_experts_a_layer_has(config: Any, experts: int) -> None:
    assert experts_of(config) == experts
