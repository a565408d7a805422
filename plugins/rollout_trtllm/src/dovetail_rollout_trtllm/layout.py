"""Parallel layouts that can't be had: refused before TensorRT-LLM spends minutes on them."""

from __future__ import annotations

from dovetail.sections import ModelSection
from dovetail.serving import refuse_indivisible
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig


def refuse_impossible(config: TrtllmRolloutConfig, model: ModelSection) -> None:
    """See that a replica's sizes divide the model.

    Args:
        config: the rollout's.
        model: the rollout's; only one in a directory is looked at.

    Raises:
        ConfigError: they do not; says which value is in the way, and what would do.
    """
    spread = config.expert_parallel_size or 1
    refuse_indivisible(model, ranks=config.attention_ranks(), spread=spread)
