"""The peer's learning curve: TRL's GRPOTrainer on prompts with a number as answer, validated as ours is. Writes one line of JSON.

    python benchmarks/peers/trl_learn.py --model MODEL --train train.jsonl --val val.jsonl --output curve.json [--seed 1] [--vllm]

Its defaults, but for what `examples/word_sums/config.yaml` sets, too: prompts and responses of a step, learning rate and
warm-up, no KL, and the reward, which is the same code. Gradient checkpointing, which a model of this size does not need, is off.
Held-out answers are greedy, by transformers, and their time is left out of `seconds`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_cpu import StepClock

from dovetail.interfaces import PluginContext
from dovetail_rewards.functions.gsm8k import Gsm8k

RULE = Gsm8k(Gsm8k.Config(name="gsm8k", method="flexible"), PluginContext())


def right(response: str, truth: str) -> float:
    """1 where the last number of a response is the answer, else 0."""
    return float(RULE.compute_score(None, response, truth)["correct"])


def rows_of(path: str) -> Dataset:
    """Read prompts (messages) with their answers from a JSONL or a Parquet file."""
    read = Dataset.from_parquet if path.endswith(".parquet") else Dataset.from_json
    kept = {"prompt", "reward_model"}
    data = read(path)
    return data.remove_columns([name for name in data.column_names if name not in kept])


class Curve(StepClock):
    """Validates before the first step and after every so many, outside the clock, and writes the curve so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.left_out = args, 0.0
        self.points: list[tuple[int, float, float]] = []
        self.rows = rows_of(args.val)
        self.trainer: GRPOTrainer | None = None

    def on_train_begin(self, *args: Any, **settings: Any) -> None:
        self.validate(0)
        super().on_train_begin(*args, **settings)

    def on_step_end(self, *args: Any, **settings: Any) -> None:
        super().on_step_end(*args, **settings)
        step = len(self.ends) - 1
        if step % self.args.validate_every == 0 or step == self.args.steps:
            began = time.perf_counter()
            self.validate(step)
            spent = time.perf_counter() - began
            # The next step begins now: all earlier ends move with it, so that differences stay.
            self.ends = [end + spent for end in self.ends]

    def validate(self, step: int) -> None:
        """Measure held-out accuracy with greedy answers."""
        assert self.trainer is not None
        model, tokenizer = self.trainer.model, self.trainer.processing_class
        texts = [
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in self.rows["prompt"]
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        model.eval()
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
            out = model.generate(
                **inputs, max_new_tokens=self.args.max_response_length, do_sample=False
            )
        model.train()
        answers = tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        truths = [row["ground_truth"] for row in self.rows["reward_model"]]
        accuracy = sum(map(right, answers, truths)) / len(truths)
        self.points.append((step, round(sum(self.seconds), 2), round(accuracy, 4)))
        self.write()

    def write(self) -> None:
        """Write what is known so far."""
        result = {
            "version": f"trl {trl.__version__}{', vLLM' if self.args.vllm else ''}",
            "curve": self.points,
            "steps_s": [round(seconds, 3) for seconds in self.seconds],
        }
        self.args.output.write_text(json.dumps(result) + "\n")


def main() -> None:
    """Train, and leave the curve in the output file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--validate-every", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-response-length", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=128, help="samples")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM, colocated")
    args = parser.parse_args()
    whole = args.prompts * args.samples
    micro = min(args.micro_batch, whole)

    def score(completions: list[Any], reward_model: list[dict[str, str]], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [
            right(text, row["ground_truth"]) for text, row in zip(texts, reward_model, strict=True)
        ]

    curve = Curve(args)
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 256,
    }
    curve.trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(args.output.with_suffix(".trl")),
            seed=args.seed,
            model_init_kwargs={"dtype": "float32"},
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            max_steps=args.steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=whole // micro,
            num_generations=args.samples,
            max_completion_length=args.max_response_length,
            temperature=1.0,
            learning_rate=2e-5,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            beta=0.0,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10,
            **(vllm if args.vllm else {}),
        ),
        train_dataset=rows_of(args.train),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[curve],
    )
    curve.trainer.train()
    curve.write()


if __name__ == "__main__":
    main()
