"""Parallel layouts that SGLang, the model or an update of weights contradicts: refused before a server spends a minute on it."""

from __future__ import annotations

from dovetail.config.sections import ModelSection
from dovetail.errors import ConfigError
from dovetail.serving.division import refuse_indivisible
from dovetail_rollout_sglang.config import SglangRolloutConfig


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
    if model is not None:
        refuse_indivisible(
            model, ranks=config.attention_ranks(), spread=config.expert_parallel_size
        )


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
