"""Supervised fine-tuning on one accelerator, ours and TRL's SFTTrainer: a random-weight Qwen2.5, examples of one length. One line of JSON.

    python benchmarks/gpu_sft.py ours --directory /tmp/sft --tokens 4096 [key=value …]
    python benchmarks/gpu_sft.py ours --directory /tmp/sft --tokens 4096 actor.engine='{name: fsdp2, lora: {rank: 32, base: nf4}}'
    python benchmarks/gpu_sft.py trl  --directory /tmp/sft --tokens 4096 [--micro-batch 8] [--liger] [--compile] [--checkpointing]

Unless the settings say otherwise, both train all parameters with float32 master weights and bfloat16 compute, on `--tokens-a-step` tokens an optimizer step, and a step is
the time from the end of one to the end of the next, data and logging included. Ours is `dovetail sft` with further settings; the
peer's examples are tokenised beforehand, and of one length, so that it neither pads nor packs. Utilisation is model FLOPs over time
and `--peak-tflops`: 6·N·T for N parameters (a tied embedding counts once) and T tokens; `with_attention` adds
6·layers·hidden·ΣL² (causal, forward and backward). What is computed again counts for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_workload as workload
import numpy as np
from update_workload import parameters_of

SKIPPED = 2
"""Steps that are left out of the medians: they compile, and reserve memory."""


def ours(args: argparse.Namespace, model: Path) -> tuple[list[float], int, str]:
    """Seconds of every step of `dovetail sft`, the most bytes that tensors took, and what ran."""
    import dovetail

    data = args.directory / f"sft_{args.tokens}.jsonl"
    # One digit is a token; the end of sequence is another.
    texts = workload.prompts(args.rows, args.tokens - 1, seed=1)
    rows = (json.dumps({"prompt": text[:1], "response": text[1:]}) + "\n" for text in texts)
    data.write_text("".join(rows))
    config = args.directory / "sft.yaml"
    config.write_text(
        json.dumps(
            {
                "output_dir": tempfile.mkdtemp(dir=args.directory),
                "model": {"path": str(model), "dtype": "bfloat16"},
                "data": {
                    "train_files": str(data),
                    "plain_prompts": "raw",
                    "train_batch_size": args.tokens_a_step // args.tokens,
                    "max_response_length": args.tokens,
                },
                "actor": {
                    "engine": {"name": "fsdp2"},
                    "objective": "nll",
                    "optim": {"lr": 1e-6},
                    "max_tokens_per_micro_batch": 65536,
                },
                "trainer": {
                    "name": "supervised",
                    "total_steps": args.steps,
                    "save_last": False,
                    "export": "none",
                    "samples_per_step": 0,
                },
                "tracking": ["jsonl"],
            }
        )
    )
    run = Path(dovetail.train(config, args.settings)["directory"])
    rows_of_steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time"] for row in rows_of_steps if "time/step" in row]
    first = next(row for row in rows_of_steps if "time/step" in row)["time/step"]
    seconds = [first, *(b - a for a, b in itertools.pairwise(ends))]
    peak = max(row.get("actor/max_memory_allocated_bytes", 0) for row in rows_of_steps)
    return seconds, int(peak), " ".join(("dovetail", *args.settings))


def trl(args: argparse.Namespace, model: Path) -> tuple[list[float], int, str]:
    """The same of TRL's SFTTrainer."""
    import torch
    import trl as library
    from datasets import Dataset
    from peers.trl_cpu import StepClock
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rng, clock = np.random.default_rng(1), StepClock()
    ids = rng.integers(10, 2000, (args.rows, args.tokens)).tolist()
    trainer = SFTTrainer(
        model=str(model),
        args=SFTConfig(
            output_dir=str(args.directory / "trl"),
            model_init_kwargs={"dtype": "float32", "attn_implementation": args.attention},
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            max_steps=args.steps,
            max_length=None,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.tokens_a_step // args.tokens // args.micro_batch,
            gradient_checkpointing=args.checkpointing,
            use_liger_kernel=args.liger,
            torch_compile=args.compile,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1000,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        callbacks=[clock],
    )
    trainer.train()
    options = [name for name in ("liger", "compile", "checkpointing") if getattr(args, name)]
    what = f"trl {library.__version__}, {args.attention}, micro-batch {args.micro_batch}"
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    return clock.seconds, peak, ", ".join([what, *options])


def main() -> None:
    """Run one of them, and print its median step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=("ours", "trl"))
    parser.add_argument("settings", nargs="*", help="of ours: key=value")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--tokens", type=int, default=4096, help="of an example")
    parser.add_argument("--tokens-a-step", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8, help="of the peer: examples")
    parser.add_argument("--attention", default="sdpa", help="of the peer")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="measured on one H200")
    args = parser.parse_intermixed_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    args.rows = args.steps * args.tokens_a_step // args.tokens
    model = args.directory / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    seconds, peak, what = (ours if args.system == "ours" else trl)(args, model)
    middle = statistics.median(seconds[SKIPPED:])
    size: dict[str, Any] = workload.MODELS[args.model]
    shape = (size["num_hidden_layers"], size["hidden_size"])
    attention = 6 * shape[0] * shape[1] * args.tokens * args.tokens_a_step
    products = 6 * parameters_of(model) * args.tokens_a_step
    available = args.peak_tflops * 1e12 * middle
    result = {
        "what": what,
        "peak_gib": round(peak / 2**30, 2),
        "tokens": args.tokens,
        "step_s": round(middle, 3),
        "all_s": [round(s, 2) for s in seconds],
        "tokens_per_s": round(args.tokens_a_step / middle),
        "mfu_6nt": round(products / available, 4),
        "mfu_with_attention": round((products + attention) / available, 4),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
