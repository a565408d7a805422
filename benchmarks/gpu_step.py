"""Times GRPO steps of a random-weight Qwen2.5-0.5B on one accelerator, through `dovetail train`.

    python benchmarks/gpu_step.py --directory /tmp/gpu_step --steps 6

Prints one JSON line: medians over the steps after the first two, in seconds and tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

QWEN_05B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
"""The shape of Qwen2.5-0.5B."""


def make_model(directory: Path, seed: int) -> None:
    """A random-weight model of that shape, with a tokenizer of the same vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from dovetail_sdk.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer(directory, vocab_size=2048)
    torch.manual_seed(seed)
    config = Qwen2Config(
        **QWEN_05B, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(str(directory))


def write_data(path: Path, prompts: int, tokens: int, seed: int) -> None:
    """Plain-string prompts of about that many tokens."""
    rng = np.random.default_rng(seed)
    rows = (
        {
            "prompt": "".join(str(d) for d in rng.integers(0, 10, tokens)),
            "data_source": "digits",
            "reward_model": {"ground_truth": "7"},
        }
        for _ in range(prompts)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Make the inputs, train, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    home: Path = args.directory
    home.mkdir(parents=True, exist_ok=True)
    make_model(home / "model", seed=1)
    write_data(home / "train.jsonl", args.prompts * args.steps, args.prompt_tokens, seed=1)
    (home / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count(str(ground_truth)) / 50\n"
    )
    command = [
        sys.executable, "-m", "dovetail.cli.main", "train", str(home / "config.yaml"), *args.overrides,
    ]  # fmt: skip
    (home / "config.yaml").write_text(
        json.dumps(
            {
                "project": "gpu",
                "experiment": "step",
                "output_dir": str(home / "runs"),
                "model": {"path": str(home / "model"), "dtype": "bfloat16"},
                "data": {
                    "train_files": [str(home / "train.jsonl")],
                    "train_batch_size": args.prompts,
                    "max_prompt_length": args.prompt_tokens + 64,
                    "max_response_length": args.new_tokens,
                    "plain_prompts": "raw",
                },
                "rollout": {"name": "hf", "n": args.samples, "ignore_eos": True},
                "actor": {"max_tokens_per_micro_batch": 32768, "optim": {"lr": 1e-6}},
                "reward": {"function": {"path": str(home / "reward.py")}},
                "trainer": {"total_steps": args.steps},
                "tracking": ["console", "jsonl"],
            }
        )
    )
    subprocess.run(command, check=True)
    lines = (home / "runs" / "gpu" / "step" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "actor/pg_loss" in row][2:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steps)

    samples = args.prompts * args.samples
    tokens = samples * (args.prompt_tokens + args.new_tokens)
    figures = {
        "step_s": median("time/step"),
        "rollout_s": median("time/rollout"),
        "update_s": median("time/update"),
        "weight_sync_s": median("time/weight_sync"),
        "rollout_new_tokens_per_s": samples * args.new_tokens / median("time/rollout"),
        "update_tokens_per_s": tokens / median("time/update"),
        "steps": len(steps),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
