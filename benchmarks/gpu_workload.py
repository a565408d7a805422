"""The GRPO workload for one or two accelerators: a random-weight Qwen2.5, prompts of digits, responses of a fixed length.

Ours (`gpu_step.py`), the peer's (`peers/trl_grpo.py`) and the bare engine's (`vllm_rollout.py`) figures are of this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = 64
RESPONSES = 8
PROMPT_TOKENS = 128
NEW_TOKENS = 512

_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN
    | {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "0.5b": _QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5b": _QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "3b": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "7b": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""The shapes of Qwen2.5-0.5B, 1.5B, 3B and 7B, and of a small model for machines without an accelerator."""


def make_model(directory: Path, seed: int, model: str = "0.5b") -> None:
    """Write a bfloat16 model of random weights in one of the shapes, with a tokenizer of a smaller vocabulary; one that is there stays."""
    if (directory / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from dovetail_sdk.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer(directory, vocab_size=2048)
    torch.manual_seed(seed)
    config = Qwen2Config(
        **MODELS[model], eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with torch.device(torch.accelerator.current_accelerator() or "cpu"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights.save_pretrained(str(directory))


def prompts(count: int, tokens: int, seed: int) -> list[str]:
    """Plain strings of so many digits: one token each in the tiny tokenizer."""
    rng = np.random.default_rng(seed)
    return ["".join(str(d) for d in rng.integers(0, 10, tokens)) for _ in range(count)]


def write_data(path: Path, count: int, tokens: int, seed: int) -> None:
    """The prompts as rows of a dataset."""
    rows = (
        {"prompt": text, "data_source": "digits", "reward_model": {"ground_truth": "7"}}
        for text in prompts(count, tokens, seed)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward(text: str) -> float:
    """How often the digit 7 occurs, over 50."""
    return text.count("7") / 50


REWARD_FILE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count(str(ground_truth)) / 50
"""
"""The same as a reward file."""
