"""Times rollouts under each of vLLM's model runners, in alternation on one accelerator.

    python benchmarks/vllm_runners.py --directory /tmp/vllm_runners --repeats 6 --max-model-len 768 --gpu-memory-utilization 0.4

Both engines are there at once, each with that share of the memory, and generate for the same prompts in turns. Prints one JSON
line: medians in seconds, and their ratio.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import attrs
from rollout_layer import context, dovetail, parser, requests

from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout


def main() -> None:
    """Measure."""
    args = parser(__doc__).parse_args()
    config = VllmRolloutConfig(
        name="vllm",
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
    )
    place = context(args)
    engines: dict[str, VllmRollout] = {}
    seconds: dict[str, list[float]] = {"v1": [], "v2": []}
    try:
        for rank, runner in enumerate(sorted(seconds)):
            made = attrs.evolve(config, model_runner=runner)
            engines[runner] = VllmRollout(made, attrs.evolve(place, rank=rank))
            engines[runner].start()
        # The first of each warms up.
        for attempt in range(args.repeats + 1):
            for runner in sorted(seconds, reverse=bool(attempt % 2)):
                todo = requests(args, attempt)
                began = time.perf_counter()
                dovetail(engines[runner], todo)
                seconds[runner].append(time.perf_counter() - began)
                sys.stderr.write(f"{attempt} {runner}: {seconds[runner][-1]:.3f} s\n")
    finally:
        for engine in engines.values():
            engine.close()
    medians = {runner: statistics.median(found[1:]) for runner, found in seconds.items()}
    figures = {
        **{f"{runner}_s": value for runner, value in medians.items()},
        "ratio": medians["v2"] / medians["v1"],
        "all_s": seconds,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
