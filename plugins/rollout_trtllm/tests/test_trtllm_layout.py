"""Layouts that can't be had are refused before a server is started, with what could be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from dovetail.errors import ConfigError
from dovetail.sections import ModelSection
from dovetail_rollout_trtllm.engine_args import engine_arguments
from dovetail_rollout_trtllm.layout import refuse_impossible


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 3}, r"=3 does not divide .* 4 attention heads(?s:.)*1, 2, 4$"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, r"has none(?s:.)*leave it out"),
    ],
)
def test_a_layout_that_the_model_or_the_replica_contradicts(
    config: Any, context: Any, settings: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_arguments(config(**settings), context())


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_more_accelerators_than_a_replica_has_are_refused_with_the_config(
    config: Any, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=2: a replica has 1 accelerator "):
        config(engine_args={name: 2})


def test_key_value_heads_may_be_shared_by_ranks(config: Any, context: Any) -> None:
    arguments = engine_arguments(config(tensor_parallel_size=4), context())
    assert arguments["tensor_parallel_size"] == 4


def test_experts_are_spread_over_sizes_that_divide_them(config: Any, tmp_path: Path) -> None:
    MixtralConfig(num_local_experts=4, num_attention_heads=8).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    refuse_impossible(config(tensor_parallel_size=4, expert_parallel_size=4), model)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=8 .* has 4(?s:.)*1, 2, 4$"):
        refuse_impossible(config(tensor_parallel_size=8, expert_parallel_size=8), model)


def test_experts_are_spread_over_a_replicas_own_ranks(config: Any) -> None:
    with pytest.raises(ValueError, match=r"=3 does not divide .*_size=4, over whose .* 1, 2, 4$"):
        config(tensor_parallel_size=4, expert_parallel_size=3)
    assert config(tensor_parallel_size=4).expert_parallel_size is None
