"""What the benchmarks of rollout engines share: requests, our side of the measurement, and taking turns with the bare engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gpu_workload import make_model

from dovetail.interfaces import (
    BaseRollout,
    Completion,
    PluginContext,
    RolloutRequest,
    SamplingParams,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all engines have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--directory", type=Path, required=True)
    made.add_argument(
        "--model", type=Path, help="a model's directory instead of a random-weight one"
    )
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument(
        "--vocabulary", type=int, default=2000, help="prompts hold token ids below it"
    )
    made.add_argument("--new-tokens", type=int, default=512)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--logprobs", action="store_true")
    made.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    made.add_argument("--max-model-len", type=int, default=4096)
    made.add_argument("--enforce-eager", action="store_true")
    return made


def context(args: argparse.Namespace) -> PluginContext:
    """A rollout's, with the model that the options name."""
    model = args.model
    if model is None:
        model = args.directory / "model"
        if not (model / "config.json").is_file():
            make_model(model, seed=1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return PluginContext(
        seed=1,
        role="rollout",
        run_directory=args.directory,
        device="cpu" if accelerator is None else f"{accelerator.type}:0",
        model=ModelSection(path=str(model), dtype="float32" if accelerator is None else "bfloat16"),
    )


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


def dovetail(engine: BaseRollout, todo: list[RolloutRequest]) -> int:
    """All samples through the plugin; returns how many tokens came."""

    async def one(request: RolloutRequest) -> list[Completion]:
        return [completion async for completion in engine.submit(request)]

    async def everything() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, todo))

    return sum(len(c.response_ids) for group in asyncio.run(everything()) for c in group)


def measure(
    args: argparse.Namespace,
    engine: BaseRollout,
    bare: Callable[[Sequence[RolloutRequest]], int],
) -> None:
    """Start the engine, let both take turns on it, and print a line of JSON; each turn goes to stderr as it ends.

    Args:
        args: the options.
        engine: the plugin, not started.
        bare: generates for requests by the engine below it; returns how many tokens came.
    """
    began = time.perf_counter()
    engine.start()
    started = time.perf_counter() - began
    sys.stderr.write(f"started in {started:.1f} s\n")
    seconds: dict[str, list[float]] = {"bare": [], "dovetail": []}
    tokens = 0
    try:
        # The first of each warms up.
        for attempt in range(args.repeats + 1):
            for turn, name in enumerate(sorted(seconds, reverse=bool(attempt % 2))):
                todo = requests(args, 2 * attempt + turn)
                began = time.perf_counter()
                tokens = bare(todo) if name == "bare" else dovetail(engine, todo)
                seconds[name].append(time.perf_counter() - began)
                sys.stderr.write(f"{attempt} {name}: {tokens} tokens, {seconds[name][-1]:.3f} s\n")
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
