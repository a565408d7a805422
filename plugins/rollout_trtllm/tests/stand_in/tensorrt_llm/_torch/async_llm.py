"""The stand-in's asynchronous engine."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from tensorrt_llm.executor.ray.gpu_worker import RayGPUWorker, extended
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs


class AsyncLLM(LLM):
    """Workers are threads where the real ones are Ray actors."""

    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(TorchLlmArgs)}
        for name in kwargs:
            if name not in known:
                raise ValueError(f"LLM got invalid argument: {name}")
        super().__init__(TorchLlmArgs(*args, **{**kwargs, "orchestrator_type": "ray"}))

    async def setup_async(self) -> AsyncLLM:
        """Start the workers."""
        kind = extended(RayGPUWorker, self.args.ray_worker_extension_cls)
        ranks = range(self.args.tensor_parallel_size)
        self.workers = [kind(rank, self.args.model, llm_args=self.args) for rank in ranks]
        if not self.args.skip_tokenizer_init:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.args.tokenizer or self.args.model)
        return self

    async def release(self, tags: Any = None) -> None:
        """Free memory."""
        await self.collective_rpc("sleep", args=(list(tags),))

    async def resume(self, tags: Any = None) -> None:
        """Take it again."""
        await self.collective_rpc("wakeup", args=(list(tags),))

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict | None = None,
        unique_reply_rank: int | None = None,
        target_ranks: Any = None,
    ) -> list[Any]:
        """Call a method of every worker, all at once."""
        calls = [asyncio.to_thread(getattr(one, method), *args) for one in self.workers]
        return list(await asyncio.gather(*calls))
