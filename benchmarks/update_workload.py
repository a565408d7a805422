"""What the update benchmarks train: a random-weight Qwen2.5, a batch for it, and an objective."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 256,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
             "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
             "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
           "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "tie_word_embeddings": False},
}  # fmt: skip
"""Shapes of Qwen2.5, and of a small model for machines without an accelerator."""


def make_model(directory: Path, size: str, seed: int) -> None:
    """Write a random-weight model of that size."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {"tie_word_embeddings": True, **SIZES[size]}
    config = Qwen2Config(
        **settings, max_position_embeddings=131072, rope_theta=1e6, dtype="bfloat16"
    )
    torch.manual_seed(seed)
    with torch.device(torch.accelerator.current_accelerator() or "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001 - no public name
    model.save_pretrained(str(directory))


def parameters_of(model: Path) -> int:
    """Parameters of the whole model, tied ones once."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def make_batch(args: argparse.Namespace) -> Any:
    """Random prompts and responses with random advantages, in the shape that the options ask for."""
    from dovetail.batch import Batch, Ragged

    rng = np.random.default_rng(args.seed)
    lengths_N = np.full(args.samples, args.response)
    if args.lengths == "skewed":
        # Most responses are short and a few are as long as allowed, as answers of reasoning models are.
        lengths_N = np.minimum(
            args.response, 16 + rng.lognormal(np.log(args.response / 8), 1.0, args.samples)
        ).astype(np.int64)
    vocabulary = SIZES[args.model]["vocab_size"]
    prompts = [
        rng.integers(0, vocabulary, args.prompt)
        for _ in range(-(-args.samples // args.responses_a_prompt))
    ]
    mask = Ragged.from_list([np.ones(n, bool) for n in lengths_N], dtype=bool)
    return Batch(
        {
            "group_id": np.arange(args.samples) // args.responses_a_prompt,
            "prompt_ids": Ragged.from_list(
                [prompts[i // args.responses_a_prompt] for i in range(args.samples)], dtype=np.int64
            ),
            "response_ids": mask.with_values(rng.integers(0, vocabulary, len(mask.values))),
            "response_mask": mask,
            "temperature": np.full(args.samples, args.temperature, np.float32),
            "advantages": rng.normal(size=args.samples).astype(np.float32),
        }
    )


def shares(batch: Any, ranks: int, partition: str) -> list[Any]:
    """A batch for each rank: balanced by tokens as dispatch does it, with divided groups, or cut in the order of arrival."""
    from dovetail.workers.modes import divide

    if partition == "balanced":
        return divide(batch, ranks, "sample").shares(batch)
    if partition == "divided":
        return divide(batch.drop(["group_id"]), ranks, "sample").shares(batch)
    return [batch.take(rows) for rows in np.array_split(np.arange(len(batch)), ranks)]


def make_objective(entropy: float) -> Any:
    """On-policy GRPO: PPO's clipped loss over token means, without a pass for old log-probabilities."""
    from dovetail.plugins import objective_spec

    return objective_spec(
        "policy",
        old_log_probs_from_current=True,
        entropy=bool(entropy),
        scalars={"entropy_coef": entropy},
    )
