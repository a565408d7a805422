"""Times rollouts by vLLM against bare vLLM: the same prompts, the same engine arguments, in alternation.

    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --repeats 5
    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --logprobs --seeding per_sample

Both are measured on one engine: *bare* hands vLLM's AsyncLLM one request of n samples a prompt and waits for all;
*dovetail* asks `VllmRollout`. Prints one JSON line: medians in seconds, new tokens per second, and their ratio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout_layer import context, measure, parser

from dovetail.interfaces import RolloutRequest
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout


def bare(engine: VllmRollout, todo: Sequence[RolloutRequest], *, seeded: bool) -> int:
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
    """Measure."""
    options = parser(__doc__)
    options.add_argument("--seeding", choices=["none", "per_sample"], default="none")
    args = options.parse_args()
    config = VllmRolloutConfig(
        name="vllm",
        seeding=args.seeding,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
    )
    engine = VllmRollout(config, context(args))
    measure(args, engine, lambda todo: bare(engine, todo, seeded=args.seeding == "per_sample"))


if __name__ == "__main__":
    main()
