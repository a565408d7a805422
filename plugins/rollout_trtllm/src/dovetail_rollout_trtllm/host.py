"""What a TensorRT-LLM server answers on its Dovetail paths: each a frame in and a frame out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.interfaces import FinishReason
from dovetail.serving import PROTOCOL, Counters, Frame, Host, SampleCall, SampleResult
from dovetail_rollout_trtllm.driver import Driver
from dovetail_rollout_trtllm.versions import installed


class TrtllmHost(Host):
    """One server's engine.

    Args:
        driver: of the engine.
        arguments: of which the engine was made.
        facts: of its model: `architectures` and `shape`.
    """

    def __init__(
        self, driver: Driver, arguments: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        self._driver, self._arguments, self._facts = driver, arguments, facts
        self._counters = Counters("new_tokens", "samples", "aborted")

    async def generate(self, call: SampleCall) -> SampleResult:
        with self._counters.running():
            result = await self._driver.generate(call)
        aborted = result.finish_reason is FinishReason.ABORT
        self._counters.add(new_tokens=len(result.response_ids), samples=1, aborted=aborted)
        return result

    async def describe(self, _: Frame) -> Frame:
        arguments, release = self._arguments, installed()
        return Frame(
            header={
                "protocol": PROTOCOL,
                "trtllm": None if release is None else str(release),
                "model": arguments["model"],
                **self._facts,
                "dtype": arguments["dtype"],
                "max_model_len": arguments.get("max_seq_len"),
                "sleep": arguments.get("sleep_config") is not None,
                "tokenizer": not arguments["skip_tokenizer_init"],
                "ranks": arguments["tensor_parallel_size"],
                "worker_extension": arguments["ray_worker_extension_cls"],
            }
        )

    async def abort(self, frame: Frame) -> Frame:
        await self._driver.abort(frame.header["calls"])
        return Frame(header={})

    async def score(self, frame: Frame) -> Frame:
        scores = await self._driver.score([array.tolist() for array in frame.arrays])
        return Frame(header={}, arrays=tuple(scores))

    async def reset_cache(self, _: Frame) -> Frame:
        await self._driver.reset_cache()
        return Frame(header={})

    async def connect(self, frame: Frame) -> Frame:
        return Frame(header=attrs.asdict(await self._driver.connect(frame.header["info"])))

    async def load(self, frame: Frame) -> Frame:
        return Frame(header=attrs.asdict(await self._driver.load(frame.header["manifest"])))

    async def sleep(self, frame: Frame) -> Frame:
        return Frame(header={"freed": await self._driver.sleep(frozenset(frame.header["tags"]))})

    async def wake(self, frame: Frame) -> Frame:
        await self._driver.wake(frozenset(frame.header["tags"]))
        return Frame(header={})

    async def figures(self, _: Frame) -> Frame:
        """Totals since the server started; who asks subtracts what it saw before. `running_max` starts anew."""
        return Frame(header=self._counters.totals())
