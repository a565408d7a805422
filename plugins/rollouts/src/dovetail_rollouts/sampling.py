"""The sampling parameters of training and of validation, from the config."""

from __future__ import annotations

from collections.abc import Collection

from dovetail.interfaces import SamplingParams
from dovetail.sections import RunConfig


def training_sampling(config: RunConfig, asked: Collection[str] = ()) -> SamplingParams:
    """Return the sampling parameters of training.

    Args:
        config: the whole config.
        asked: the columns that the engine must return: `rollout_log_probs`, `raw_rollout_log_probs`, both or neither.
    """
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        ignore_eos=rollout.ignore_eos,
        log_probs="rollout_log_probs" in asked,
        raw_log_probs="raw_rollout_log_probs" in asked,
    )


def asked_of(sampling: SamplingParams) -> frozenset[str]:
    """Return the log-probability columns that these parameters make the engine return."""
    asked = {
        "rollout_log_probs": sampling.log_probs,
        "raw_rollout_log_probs": sampling.raw_log_probs,
    }
    return frozenset(column for column, wanted in asked.items() if wanted)


def validation_sampling(config: RunConfig) -> SamplingParams:
    """Return the sampling parameters of validation."""
    how = config.rollout.validation
    return SamplingParams(
        max_new_tokens=how.max_response_length or config.data.max_response_length,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        stop=config.rollout.stop,
        stop_token_ids=config.rollout.stop_token_ids,
    )
