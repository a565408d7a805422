"""Checks that a replica's ranks divide a model's heads and experts, before an engine takes minutes to start."""

from __future__ import annotations

from dovetail.errors import ConfigError
from dovetail.sections import ModelSection

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts in the configs of models."""


def refuse_indivisible(model: ModelSection, *, ranks: int, spread: int = 1) -> None:
    """Check that a serving engine can divide a model over a replica's ranks (tensor and expert parallelism).

    Every rank must get the same number of attention heads and of key-value heads; if there are more ranks than key-value heads, the
    same number of ranks must share each head. With expert parallelism, every rank must get the same number of experts.

    Args:
        model: the rollout's model; not checked unless its config is on this machine and transformers can read it.
        ranks: the number of ranks over which attention heads are divided (`rollout.tensor_parallel_size`).
        spread: the number of ranks over which experts are spread (`rollout.expert_parallel_size`).

    Raises:
        ConfigError: the model can't be divided; the error names the setting and values that fit.
    """
    from dovetail_datasets import text_config

    if ranks == spread == 1 or (text := text_config(model.path, model)) is None:
        return
    _refuse_heads(text, model.path, ranks)
    if spread > 1:
        _refuse_experts(text, model.path, spread)


def experts_of(config: object) -> int:
    """Return the number of experts per layer of a model, from its Hugging Face text config; 0 without experts."""
    return next((int(n) for name in _EXPERTS if (n := getattr(config, name, None))), 0)


def divisors(number: int) -> str:
    """Return all divisors of a number as text, for a hint."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _refuse_heads(text: object, path: str, ranks: int) -> None:
    heads: int = getattr(text, "num_attention_heads", None) or 0
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and _share(kv_heads, n)]
    if heads and ranks not in fitting:
        raise ConfigError(
            f"rollout.tensor_parallel_size={ranks} does not divide the {heads} attention heads and {kv_heads} key-value heads of "
            f"{path}",
            hint=f"set rollout.tensor_parallel_size to one of {', '.join(map(str, fitting))}",
        )


def _share(heads: int, ranks: int) -> bool:
    """Return whether every rank gets the same number of whole heads, or every head is shared by the same number of ranks."""
    return heads % ranks == 0 or ranks % heads == 0


def _refuse_experts(text: object, path: str, spread: int) -> None:
    experts = experts_of(text)
    if experts % spread or not experts:
        raise ConfigError(
            f"rollout.expert_parallel_size={spread} does not divide the {experts} experts in a layer of {path}"
            if experts
            else f"rollout.expert_parallel_size={spread} needs experts, but the model {path} has none",
            hint=f"set rollout.expert_parallel_size to one of {divisors(experts)}"
            if experts
            else "leave rollout.expert_parallel_size out",
        )
