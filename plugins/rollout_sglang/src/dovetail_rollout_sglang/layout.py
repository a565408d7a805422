"""Parallel layouts that SGLang, the model or an update of weights contradicts: refused before a server spends a minute on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.config.sections import ModelSection
from dovetail.errors import ConfigError
from dovetail_rollout_sglang.config import SglangRolloutConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What models call the number of their experts."""


def refuse_impossible(config: SglangRolloutConfig, model: ModelSection | None) -> None:
    """See that a layout can be had, and that updates of weights reach all of it.

    Args:
        config: the rollout's.
        model: the rollout's; only one in a directory is looked at.

    Raises:
        ConfigError: an argument asks for what can't be had; says which value is in the way.
    """
    _refuse_copies(config)
    _refuse_unreached(config)
    divided = config.tensor_parallel_size > 1  # experts are spread over no others
    if divided and model is not None and (Path(model.path) / "config.json").is_file():
        _refuse_indivisible(config, model)


def _refuse_copies(config: SglangRolloutConfig) -> None:
    theirs = config.engine_args
    copies, ranks = theirs.get("dp_size", 1), config.tensor_parallel_size
    if copies == 1:
        return
    if not theirs.get("enable_dp_attention"):
        raise ConfigError(
            f"rollout.engine_args.dp_size={copies} starts several copies of the model behind one server, which take "
            "no updates of weights",
            hint="set rollout.replicas for several copies, or enable_dp_attention=true beside it",
        )
    if ranks % copies:
        raise ConfigError(
            f"rollout.engine_args.dp_size={copies} does not divide rollout.tensor_parallel_size={ranks}: attention is "
            "spread over those ranks"
        )
    if config.max_adapter_rank is not None:
        raise ConfigError(
            f"rollout.max_adapter_rank is set beside enable_dp_attention with dp_size={copies}, whose schedulers would have to "
            "take adapters in step",
            hint="send merged weights (actor.engine.lora.sync: merged), or leave enable_dp_attention out",
        )


def _refuse_unreached(config: SglangRolloutConfig) -> None:
    for name, why, hint in (
        (
            "pp_size",
            "updates of weights do not reach the stages of a pipeline",
            "divide the model with rollout.tensor_parallel_size",
        ),
        (
            "nnodes",
            "a replica's server runs on one machine",
            "set rollout.tensor_parallel_size to what one machine has, and rollout.replicas for more",
        ),
    ):
        if config.engine_args.get(name, 1) != 1:
            raise ConfigError(
                f"rollout.engine_args.{name}={config.engine_args[name]}: {why}", hint=hint
            )


def _refuse_indivisible(config: SglangRolloutConfig, model: ModelSection) -> None:
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    text = found.get_text_config()
    ranks, spread = config.tensor_parallel_size, config.expert_parallel_size
    heads: Any = getattr(text, "num_attention_heads", None)
    if heads and heads % ranks:
        raise ConfigError(
            f"rollout.tensor_parallel_size={ranks} does not divide the {heads} attention heads of {model.path}",
            hint=f"set it to one of {_divisors(heads)}",
        )
    kv_heads: Any = getattr(text, "num_key_value_heads", None)
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"rollout.tensor_parallel_size={ranks} and the {kv_heads} key-value heads of {model.path} do not divide one another",
            hint=f"set it to one of {_divisors(kv_heads)}",
        )
    if spread == 1:
        return
    experts = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
    if not experts:
        raise ConfigError(
            f"rollout.expert_parallel_size={spread} spreads experts, and {model.path} has none",
            hint="leave it out",
        )
    if experts % spread:
        raise ConfigError(
            f"rollout.expert_parallel_size={spread} does not divide the {experts} experts of {model.path}",
            hint=f"set it to one of {_divisors(experts)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
