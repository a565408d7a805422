"""The peer: TRL's GRPOTrainer on the fixed workload, in an environment of its own. Prints one line of JSON.

    .venv-trl/bin/python benchmarks/peers/trl_cpu.py [--seed 1] [--threads 2]

The settings make TRL do the same work as the workload states, and nothing more: no gradient checkpointing (on
by default), no checkpoints, no reports, no end of sequence, beta 0. The rest, such as its loss and its
fused AdamW, is TRL's default.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
import trl
import workload
from datasets import Dataset
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step, from the end of the one before it: everything that a step costs."""
        return [end - start for start, end in itertools.pairwise(self.ends)]


def make_trainer(seed: int, output: str, clock: StepClock) -> tuple[GRPOTrainer, list[int]]:
    """TRL's trainer with the workload, and a list that collects the length of every response."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**workload.MODEL)).float()
    lengths: list[int] = []

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [workload.reward(completion) for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=output,
            seed=seed,
            use_cpu=True,
            bf16=False,
            max_steps=workload.STEPS,
            per_device_train_batch_size=workload.PROMPTS * workload.RESPONSES,
            gradient_accumulation_steps=1,
            num_generations=workload.RESPONSES,
            max_completion_length=workload.NEW_TOKENS,
            temperature=1.0,
            learning_rate=workload.LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": workload.prompts(seed)}),
        processing_class=workload.word_tokenizer(),
        callbacks=[clock],
    )
    # Exactly so many new tokens: nothing ends a response early.
    trainer.eos_token_ids = []
    trainer.generation_config.eos_token_id = None
    return trainer, lengths


def main() -> None:
    """Run the workload and print the seconds of every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output:
        trainer, lengths = make_trainer(arguments.seed, output, clock)
        trainer.train()
    expected = workload.STEPS * workload.PROMPTS * workload.RESPONSES
    if len(lengths) != expected or set(lengths) != {workload.NEW_TOKENS}:
        sys.exit(
            f"the peer did other work than the workload states: {len(lengths)} responses of "
            f"{sorted(set(lengths))} tokens, where {expected} of {workload.NEW_TOKENS} were due"
        )
    result = {
        "system": f"trl {trl.__version__}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "loss": trainer.args.loss_type,
        "optimizer": str(trainer.args.optim),
        "step_seconds": clock.seconds,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
