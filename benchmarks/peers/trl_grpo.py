"""The peer on the accelerator's workload: TRL's GRPOTrainer with vLLM colocated. Prints one line of JSON.

    python benchmarks/peers/trl_grpo.py --directory /tmp/gpu_step [--lean] [--keep-activations]
    python benchmarks/peers/trl_grpo.py --directory /tmp/whole --model 7b --prompts 16 --lora 32 --micro-batch 16

Its defaults, and the workload's sizes. `--lean` leaves out what ours leaves out too: the importance correction, which makes
vLLM return log-probabilities; Liger's loss instead of logits. `--keep-activations` computes none of them again, as ours does
where memory allows. `--lora` trains adapters of that rank on all linear layers beside weights in bfloat16 (needs peft), while
vLLM sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_workload as workload
import psutil
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_cpu import StepClock

SKIPPED = 2
"""Steps that are left out of the medians."""


class ToldClock(StepClock):
    """Says at once when each step ended, for runs that a time limit ends."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        super().on_train_begin()
        self.start_s = time.time() - psutil.Process().create_time()
        sys.stderr.write(f"training began at {time.time():.2f}\n")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        super().on_step_end()
        sys.stderr.write(f"step {len(self.ends) - 1} ended at {time.time():.2f}\n")


def time_publications(trainer: GRPOTrainer) -> list[float]:
    """Seconds of every publication of weights from here on."""
    seconds, publish = list[float](), trainer.vllm_generation.sync_weights

    def timed() -> None:
        torch.accelerator.synchronize()
        began = time.perf_counter()
        publish()
        torch.accelerator.synchronize()
        seconds.append(round(time.perf_counter() - began, 3))
        sys.stderr.write(f"published in {seconds[-1]}\n")

    trainer.vllm_generation.sync_weights = timed
    return seconds


def make_trainer(args: argparse.Namespace, clock: StepClock, lengths: list[int]) -> GRPOTrainer:
    """TRL's trainer with the workload; `lengths` collects the length of every response."""
    model = args.directory / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    rows = workload.prompts(args.prompts * args.steps, workload.PROMPT_TOKENS, seed=1)
    samples = args.prompts * workload.RESPONSES
    adapters = None
    if args.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules="all-linear")

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [workload.reward(completion) for completion in completions]

    return GRPOTrainer(
        model=str(model),
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(args.directory / "trl"),
            model_init_kwargs={"dtype": "bfloat16" if args.lora else "float32"},
            bf16=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=samples // args.micro_batch,
            num_generations=workload.RESPONSES,
            max_completion_length=workload.NEW_TOKENS,
            temperature=1.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=not args.keep_activations,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.5,
            vllm_enable_sleep_mode=bool(args.lora),
            vllm_max_model_length=workload.PROMPT_TOKENS + 64 + workload.NEW_TOKENS,
            vllm_importance_sampling_correction=not args.lean,
            use_liger_kernel=args.lean,
            generation_kwargs={"ignore_eos": True, "min_tokens": workload.NEW_TOKENS},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1000,
        ),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        callbacks=[clock],
        peft_config=adapters,
    )


def main() -> None:
    """Run the workload and print the median step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--lora", type=int, help="rank; absent: all weights are trained")
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("--keep-activations", action="store_true")
    args = parser.parse_args()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    clock, lengths = ToldClock(), []
    trainer = make_trainer(args, clock, lengths)
    published = time_publications(trainer)
    trainer.train()
    due = args.steps * args.prompts * workload.RESPONSES
    if len(lengths) != due or set(lengths) != {workload.NEW_TOKENS}:
        sys.exit(
            f"other work than was stated: {len(lengths)} responses of {sorted(set(lengths))[:5]} tokens, {due} due"
        )
    steps = clock.seconds[SKIPPED:]
    result = {
        "system": f"trl {trl.__version__}{' lean' if args.lean else ''}",
        "keep_activations": args.keep_activations,
        "torch": torch.__version__,
        "model": args.model,
        "step_s": round(statistics.median(steps), 3),
        "step_by_step_s": " ".join(f"{seconds:.2f}" for seconds in clock.seconds),
        "start_to_first_step_s": round(clock.start_s, 1),
        "steps": len(steps),
        "publication_s": published,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
