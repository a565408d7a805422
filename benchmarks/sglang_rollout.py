"""Times rollouts by SGLang against bare SGLang: the same prompts, the same server, in alternation.

    python benchmarks/sglang_rollout.py --directory /tmp/sglang_rollout --repeats 5 --logprobs

*bare* posts one request of n samples a prompt to the server's own `/generate`, as clients of SGLang do; *dovetail* asks
`SglangRollout`. Prints one JSON line: medians in seconds, new tokens per second, and their ratio.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2
from rollout_layer import context, measure, parser

from dovetail.interfaces import RolloutRequest
from dovetail_rollout_sglang.backend import SglangBackend
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_serving import Backend, OwnServer


class KnownBackend(SglangBackend):
    """A server whose token is known, so that its own paths answer."""

    token = ""

    def start_server(self, token: str) -> OwnServer:
        """As the base does."""
        self.token = token
        return super().start_server(token)


class KnownRollout(SglangRollout):
    """Over such a server."""

    def make_backend(self) -> Backend:
        """As the base does."""
        return KnownBackend(self.config, self.context)


def bare(engine: SglangRollout, todo: Sequence[RolloutRequest]) -> int:
    """The same by the server's own path, with SGLang's own fan-out to n samples; returns how many tokens came."""
    backend: Any = engine.backend

    async def one(client: httpx2.AsyncClient, request: RolloutRequest) -> int:
        answer = await client.post(
            "/generate",
            json={
                "input_ids": request.prompt_ids.tolist(),
                "sampling_params": {
                    "n": request.n,
                    "max_new_tokens": request.sampling.max_new_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": request.sampling.log_probs,
            },
        )
        answer.raise_for_status()
        found = answer.json()
        return sum(len(each["output_ids"]) for each in (found if request.n > 1 else [found]))

    async def everything() -> int:
        async with httpx2.AsyncClient(
            base_url=backend.url,
            headers={"authorization": f"Bearer {backend.token}"},
            timeout=None,
            limits=httpx2.Limits(max_connections=None),
        ) as client:
            return sum(await asyncio.gather(*(one(client, request) for request in todo)))

    return asyncio.run(everything())


def main() -> None:
    """Measure."""
    options = parser(__doc__)
    options.add_argument(
        "--engine-args", type=json.loads, default={}, help="arguments of SGLang's, as JSON"
    )
    options.add_argument("--kv-cache-dtype", default="auto", help="such as fp8_e5m2")
    options.add_argument("--quantization", help="such as fp8")
    args = options.parse_args()
    config = SglangRolloutConfig(
        name="sglang",
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        engine_args=args.engine_args,
    )
    engine = KnownRollout(config, context(args))
    measure(args, engine, lambda todo: bare(engine, todo))


if __name__ == "__main__":
    main()
