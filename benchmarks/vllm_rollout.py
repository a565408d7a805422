"""Times rollouts by vLLM against bare vLLM: the same prompts, the same engine arguments, in alternation.

    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --repeats 5
    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --logprobs --seeding per_sample

Both are measured on one engine: *bare* hands vLLM's AsyncLLM one request of n samples a prompt and waits for all;
*dovetail* asks `VllmRollout`. Prints one JSON line: medians in seconds, new tokens per second, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_workload import make_model

from dovetail.config.sections import ModelSection
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.rollout import Completion, RolloutRequest, SamplingParams
from dovetail.numerics.streams import SampleStream
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout


def requests(args: argparse.Namespace, attempt: int) -> list[RolloutRequest]:
    """Random prompts, others in every attempt: no cache knows them."""
    rng = np.random.default_rng(attempt)
    sampling = SamplingParams(
        max_new_tokens=args.new_tokens, ignore_eos=True, log_probs=args.logprobs
    )
    return [
        RolloutRequest(
            request_id=f"{attempt}.{prompt}",
            prompt_ids=rng.integers(10, args.vocabulary, args.prompt_tokens),
            sampling=sampling,
            streams=tuple(
                SampleStream(seed=attempt, prompt=prompt, sample=sample)
                for sample in range(args.samples)
            ),
        )
        for prompt in range(args.prompts)
    ]


def dovetail(engine: VllmRollout, todo: list[RolloutRequest]) -> int:
    """All samples through the plugin; returns how many tokens came."""

    async def one(request: RolloutRequest) -> list[Completion]:
        return [completion async for completion in engine.submit(request)]

    async def everything() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, todo))

    return sum(len(c.response_ids) for group in asyncio.run(everything()) for c in group)


def bare(engine: VllmRollout, todo: list[RolloutRequest], *, seeded: bool) -> int:
    """The same through the engine below it, with vLLM's own fan-out to n samples; returns how many tokens came."""
    backend: Any = engine.backend
    asynchronous = backend.engine

    async def one(request: RolloutRequest) -> int:
        from vllm import SamplingParams as TheirParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = TheirParams(
            n=request.n,
            max_tokens=request.sampling.max_new_tokens,
            ignore_eos=True,
            seed=abs(request.streams[0].key()[0]) if seeded else None,
            logprobs=0 if request.sampling.log_probs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(request.prompt_ids.tolist())
        count = 0
        async for output in asynchronous.generate(prompt, params, request.request_id):
            count += sum(len(sample.token_ids) for sample in output.outputs)
        return count

    async def everything() -> int:
        return sum(await asyncio.gather(*map(one, todo)))

    found: int = backend.loop.wait(everything())
    return found


def main() -> None:
    """Make the model, start the engine, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, help="a model's directory instead of a random-weight one"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--vocabulary", type=int, default=2000, help="prompts hold token ids below it"
    )
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--seeding", choices=["none", "per_sample"], default="none")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    model = args.model
    if model is None:
        model = args.directory / "model"
        if not (model / "config.json").is_file():
            make_model(model, seed=1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    engine = VllmRollout(
        VllmRolloutConfig(
            name="vllm",
            seeding=args.seeding,
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_model_len=args.max_model_len,
            enforce_eager=args.enforce_eager,
        ),
        PluginContext(
            seed=1,
            role="rollout",
            run_directory=args.directory,
            device="cpu" if accelerator is None else f"{accelerator.type}:0",
            model=ModelSection(
                path=str(model), dtype="float32" if accelerator is None else "bfloat16"
            ),
        ),
    )
    began = time.perf_counter()
    engine.start()
    started = time.perf_counter() - began
    seconds: dict[str, list[float]] = {"bare": [], "dovetail": []}
    tokens = 0
    try:
        # The first of each warms up.
        for attempt in range(args.repeats + 1):
            for turn, name in enumerate(sorted(seconds, reverse=bool(attempt % 2))):
                todo = requests(args, 2 * attempt + turn)
                began = time.perf_counter()
                if name == "bare":
                    tokens = bare(engine, todo, seeded=args.seeding == "per_sample")
                else:
                    tokens = dovetail(engine, todo)
                seconds[name].append(time.perf_counter() - began)
    finally:
        engine.close()
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    figures = {
        "start_s": started,
        **{f"{name}_s": value for name, value in medians.items()},
        **{f"{name}_tokens_per_s": tokens / value for name, value in medians.items()},
        "ratio": medians["dovetail"] / medians["bare"],
        "all_s": seconds,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
