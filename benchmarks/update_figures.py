"""What follows from an update's seconds, and where on the device and the host they go."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from update_workload import SIZES


def figures(
    args: argparse.Namespace, seconds: Sequence[float], parameters: int, batch: Any, ranks: int
) -> dict[str, Any]:
    """What follows from the seconds of every measured update."""
    size = SIZES[args.model]
    lengths_N = (batch["prompt_ids"].lengths + batch["response_ids"].lengths).astype(np.float64)
    tokens, middle = int(lengths_N.sum()), statistics.median(seconds)
    # The heads' sizes multiply out to the hidden size in these models.
    attention = 6 * size["num_hidden_layers"] * size["hidden_size"] * float((lengths_N**2).sum())
    available = args.peak_tflops * 1e12 * ranks * middle
    return {
        "seconds": round(middle, 3),
        "all_seconds": [round(s, 3) for s in seconds],
        "tokens_per_s": round(tokens / middle),
        "mfu_6nt": round(6 * parameters * tokens / available, 4),
        "mfu_with_attention": round((6 * parameters * tokens + attention) / available, 4),
        "tokens": tokens,
        "parameters": parameters,
    }


def predicted_gib(
    args: argparse.Namespace, engine: Any, parameters: int, settings: dict[str, Any]
) -> dict[str, float]:
    """What `dovetail plan` says that a rank's accelerator holds in an update; nothing of an engine that can't tell."""
    from dovetail.interfaces import UpdateSize

    # A last prompt may have fewer responses.
    prompts = -(-args.samples // args.responses_a_prompt)
    size = UpdateSize(
        prompts=-(-prompts // args.ranks),
        responses=min(args.responses_a_prompt, args.samples),
        prompt_tokens=args.prompt,
        response_tokens=args.response,
        budget=settings.get("max_tokens_per_micro_batch", 16384),
    )
    model = engine.context.model
    working = engine.working_memory(
        engine.config, model, head="lm", trained=True, ranks=args.ranks, size=size
    )
    if working is None:
        return {}
    adapter = engine.config.planned_adapter()
    trained, frozen = parameters, 0
    if adapter.rank is not None:
        trained, frozen = engine.shape(model).adapter_parameters(adapter), 2 * parameters
    # Weights, gradients and AdamW's two moments in float32.
    states = (16 * trained + frozen) // args.ranks
    most = states + sum(working.parts.values())
    found = {"predicted_gib": most, "predicted_least_gib": most - working.spare}
    return {name: round(size / 2**30, 2) for name, size in found.items()}


def profile(engine: Any, batch: Any, objective: Any, args: argparse.Namespace, rank: int) -> None:
    """Print where the device's time of one update goes."""
    import torch

    with torch.profiler.profile() as profiler:
        begun = time.perf_counter()
        engine.update(batch, objective)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        wall = time.perf_counter() - begun
    if rank:
        return
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    # Kernels themselves, not the operators that started them: each second counts once.
    kernels = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU] or events
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    sys.stdout.write(f"# profiled update: {wall:.3f} s, kernels {busy:.3f} s\n")
    for event in kernels[: args.top]:
        sys.stdout.write(
            f"# {event.self_device_time_total / 1e3:9.1f} ms {event.count:6d} x  {event.key[:120]}\n"
        )
    operators = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    for event in operators[: args.top // 2]:
        sys.stdout.write(
            f"# host {event.self_cpu_time_total / 1e3:9.1f} ms {event.count:6d} x  {event.key[:100]}\n"
        )
    sys.stdout.flush()
