"""Parallel layouts that can't be had: refused before TensorRT-LLM spends minutes on them."""

from __future__ import annotations

from dovetail.config.sections import ModelSection
from dovetail.errors import ConfigError
from dovetail.serving.division import divisors, refuse_indivisible
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig

_FURTHER = ("pipeline_parallel_size", "context_parallel_size")
"""Arguments that would take more accelerators than the run gives to a replica."""


def refuse_impossible(config: TrtllmRolloutConfig, model: ModelSection) -> None:
    """See that a replica's accelerators suffice, and that its sizes divide the model.

    Args:
        config: the rollout's.
        model: the rollout's; only one in a directory is looked at.

    Raises:
        ConfigError: they do not; says which value is in the way, and what would do.
    """
    ranks, spread = config.tensor_parallel_size, config.expert_parallel_size or 1
    for name in _FURTHER:
        if config.engine_args.get(name, 1) != 1:
            raise ConfigError(
                f"rollout.engine_args.{name}={config.engine_args[name]}: a replica has {ranks} "
                f"accelerator{'' if ranks == 1 else 's'} (rollout.tensor_parallel_size), and its updates reach no further",
                hint="leave it out, and divide the model by rollout.tensor_parallel_size",
            )
    if ranks % spread:
        raise ConfigError(
            f"rollout.expert_parallel_size={spread} does not divide rollout.tensor_parallel_size={ranks}, over whose "
            "accelerators experts are spread",
            hint=f"set it to one of {divisors(ranks)}",
        )
    refuse_indivisible(model, ranks=config.attention_ranks(), spread=spread)
