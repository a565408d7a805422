"""Times rollouts by vLLM against bare vLLM: the same prompts, the same engine arguments, in alternation.

    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --repeats 5
    python benchmarks/vllm_rollout.py --directory /tmp/vllm_rollout --logprobs --seeding per_sample

Both are measured on one engine: *bare* hands vLLM's AsyncLLM one request of n samples a prompt and waits for all, and gets
log-probabilities vLLM's own way; *dovetail* asks `VllmRollout`. Prints one JSON line: medians in seconds, new tokens per second, and
their ratio.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rollout_layer import context, measure, parser

from dovetail.interfaces import RolloutRequest
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout


def unrecorded(worker: Any) -> None:
    """Run in vLLM's worker: it passes log-probabilities on itself."""
    runner = worker.model_runner
    runner.sampler = getattr(worker.dovetail_recorder, "_sampler", runner.sampler)


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
        await asynchronous.collective_rpc(unrecorded)
        count = sum(await asyncio.gather(*map(one, todo)))
        await asynchronous.collective_rpc("dovetail_record")
        return count

    return backend.loop.wait(everything())


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
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # calls `unrecorded` in the worker
    engine = VllmRollout(config, context(args))
    measure(args, engine, lambda todo: bare(engine, todo, seeded=args.seeding == "per_sample"))


if __name__ == "__main__":
    main()
