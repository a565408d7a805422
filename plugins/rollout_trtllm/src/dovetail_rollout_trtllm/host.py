"""What a TensorRT-LLM server answers on its Dovetail paths: each a frame in and a frame out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.serving.backend import SampleCall, SampleResult
from dovetail.serving.frames import Frame
from dovetail.serving.messages import PROTOCOL
from dovetail.serving.routes import Host
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
        self._counts = dict.fromkeys(
            ("new_tokens", "samples", "aborted", "busy_seconds", "sample_seconds", "running_max"),
            0.0,
        )
        self._last = time.monotonic()

    async def generate(self, call: SampleCall) -> SampleResult:
        self._look()
        running = self._driver.running + 1
        self._counts["running_max"] = max(self._counts["running_max"], running)
        try:
            result = await self._driver.generate(call)
        except BaseException:
            self._look(more=1)
            raise
        self._look(more=1)
        self._counts["new_tokens"] += len(result.response_ids)
        self._counts["samples"] += 1
        self._counts["aborted"] += result.finish_reason.value == "abort"
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
        self._look()
        totals = dict(self._counts)
        self._counts["running_max"] = float(self._driver.running)
        return Frame(header=totals)

    def _look(self, more: int = 0) -> None:
        """Count the time since the last look, for as many samples as ran in it.

        Args:
            more: samples that ran until now and are no more among those that the driver counts.
        """
        now = time.monotonic()
        running = self._driver.running + more
        if running:
            self._counts["busy_seconds"] += now - self._last
            self._counts["sample_seconds"] += running * (now - self._last)
        self._last = now
