"""How many layers each pipeline stage has. The last stage may have another number than the others, since it also has the output
layer.
"""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError

OUTPUT = 0.6
"""Cost per parameter of the output layer with softmax, relative to the cost per parameter of a decoder layer. Below 1, since large
matrix products are more efficient, and only scored tokens need logits."""


def last_stage_layers(layers: int, stages: int, output: float) -> int:
    """Return how many layers the last stage needs to minimise the slowest stage's time; other stages have equally many layers.

    Args:
        layers: the number of layers of the model.
        stages: the number of stages, from 2 to `layers`.
        output: the cost of the output layer, in units of one decoder layer.

    Raises:
        ConfigError: there are more stages than layers.
    """
    return min(_fitting(layers, stages), key=lambda last: _slowest(layers, stages, last, output))


def output_cost(hf: Any, head_size: int) -> float:
    """Return the cost of a model's output layer, in units of one decoder layer; for a mixture of experts, only active parameters count.

    Args:
        hf: the model's Hugging Face config.
        head_size: the number of features of an attention head.
    """
    hidden, heads = hf.hidden_size, hf.num_attention_heads + hf.num_key_value_heads
    inner = getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size
    active = getattr(hf, "num_experts_per_tok", None) or 1
    layer = 2 * hidden * head_size * heads + 3 * hidden * inner * active
    return OUTPUT * float(hf.vocab_size * hidden / layer)


def check_stages(layers: int, stages: int) -> None:
    """Check that every stage gets at least one layer.

    The number of stages need not divide the layers: the last stage may have more or fewer than other stages.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the model's {layers} layers; every stage needs at least one layer",
            hint=f"use at most {layers}",
        )


def check_last_stage(last: int, layers: int, stages: int) -> None:
    """Check that the layers outside the last stage can be divided evenly over the other stages.

    Raises:
        ConfigError: the layers can't be divided (the error names values that fit), or there are more stages than layers.
    """
    fitting, others = _fitting(layers, stages), stages - 1
    if last not in fitting:
        left = f"{max(layers - last, 0)} of the model's {layers} layers"
        whose = "the other stage" if others == 1 else f"the other {others} stages"
        why = (
            "which they can't share evenly"
            if layers - last >= others
            else "and every stage needs at least one"
        )
        raise ConfigError(
            f"last_stage_layers={last} leaves {left} to {whose}, {why}",
            hint=f"use {'one of ' if len(fitting) > 1 else ''}{', '.join(map(str, fitting))}, or leave last_stage_layers out",
        )


def _fitting(layers: int, stages: int) -> list[int]:
    check_stages(layers, stages)
    most = layers - (stages - 1)
    return [last for last in range(1, most + 1) if not (layers - last) % (stages - 1)]


def _slowest(layers: int, stages: int, last: int, output: float) -> tuple[float, float]:
    """Return the cost of the slowest stage, and a tie-breaker that prefers an even split."""
    other = (layers - last) / (stages - 1)
    return max(other, last + output), abs(other - last)
