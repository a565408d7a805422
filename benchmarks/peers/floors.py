"""What the parts of a GRPO step take bare: generation by vLLM's offline class, an update by transformers. One line of JSON each.

    python benchmarks/peers/floors.py generate --directory /tmp/gpu_step [--logprobs] [--detokenize]
    python benchmarks/peers/floors.py update   --directory /tmp/gpu_step [--checkpointing] [--micro-batch 16]

The workload of `gpu_workload.py`: 64 prompts × 8 responses, 128 + 512 tokens. `update` is one AdamW step with float32 weights and
bfloat16 autocast, cross-entropy over the responses alone. Nothing checks, scores or dispatches: a framework can't be faster without
doing less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_workload as workload
import numpy as np


def generate(args: argparse.Namespace, model: Path) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each round, and new tokens of one."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        max_model_len=args.prompt_tokens + args.new_tokens,
        gpu_memory_utilization=0.5,
        seed=0,
        disable_log_stats=True,
        generation_config="vllm",
    )
    sampling = SamplingParams(
        n=args.samples,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        detokenize=args.detokenize,
        logprobs=0 if args.logprobs else None,
    )
    seconds, tokens = [], 0
    for number in range(args.rounds + 1):
        # Prompts of a round are new: none is in the prefix cache.
        ids = np.random.default_rng(number).integers(10, 2000, (args.prompts, args.prompt_tokens))
        prompts: Any = [{"prompt_token_ids": row.tolist()} for row in ids]
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return seconds[1:], {"new_tokens": tokens}


def update(args: argparse.Namespace, model: Path) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each round after the first, and the most memory that tensors took."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).to(device)
    network.config.use_cache = False
    network.train()
    if args.checkpointing:
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)
    samples, new = args.prompts * args.samples, args.new_tokens
    ids_NT = torch.randint(10, 2000, (samples, args.prompt_tokens + new), device=device)
    seconds = []
    for _ in range(args.rounds + 1):
        began = time.perf_counter()
        for part_MT in ids_NT.split(args.micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                logits = network(part_MT, logits_to_keep=new + 1).logits[:, :-1]
                loss = cross_entropy(logits.flatten(0, 1), part_MT[:, -new:].flatten())
            (loss * len(part_MT) / samples).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.accelerator.max_memory_allocated() if device.type != "cpu" else 0
    return seconds[1:], {"tokens": ids_NT.numel(), "peak_gib": round(peak / 2**30, 1)}


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("generate", "update"))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS)
    parser.add_argument("--samples", type=int, default=workload.RESPONSES)
    parser.add_argument("--prompt-tokens", type=int, default=workload.PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=workload.NEW_TOKENS)
    parser.add_argument("--micro-batch", type=int, default=16, help="of update: samples")
    parser.add_argument("--checkpointing", action="store_true", help="of update")
    parser.add_argument("--logprobs", action="store_true", help="of generate")
    parser.add_argument("--detokenize", action="store_true", help="of generate")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    model = args.directory / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    seconds, more = (generate if args.what == "generate" else update)(args, model)
    result = {
        "what": f"bare {args.what}",
        "model": args.model,
        "seconds": round(statistics.median(seconds), 3),
        "all_s": [round(value, 3) for value in seconds],
        **more,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
