"""Workers of the stand-in: in this process, each with a model of its own."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType


class RayGPUWorker:
    """One worker."""

    def __init__(
        self,
        device_id: int,
        engine: Path,
        executor_config: Any = None,
        batched_logits_processor: Any = None,
        postproc_worker_config: Any = None,
        is_llm_executor: bool | None = None,
        hf_model_dir: Path | None = None,
        tokenizer: Any = None,
        llm_args: Any = None,
        rpc_addr: str | None = None,
        hmac_key: bytes = b"",
    ) -> None:
        self.device_id = device_id
        self.llm_args = llm_args
        self.engine: Any = PyExecutor(llm_args)

    def sleep(self, sleep_tags: list[str]) -> None:
        """Free memory: what is there of keys and values is lost, and nobody is told."""
        self.engine.asleep |= self._kinds(sleep_tags)
        if ExecutorMemoryType.KV_CACHE in self.engine.asleep:
            self.engine.spoil_prefixes()

    def wakeup(self, wakeup_tags: list[str]) -> None:
        """Take it again."""
        self.engine.asleep -= self._kinds(wakeup_tags)

    def die(self) -> None:
        """For tests: as if the process were killed."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _kinds(self, tags: list[str]) -> set[ExecutorMemoryType]:
        if self.llm_args.sleep_config is None:
            raise ValueError("Sleep feature is not enabled, please set sleep_config")
        return {ExecutorMemoryType(tag) for tag in tags}


def extended(worker: type, name: str | None) -> type:
    """The class of workers with an extension, which must not have anything that they have."""
    if not name:
        return worker
    module, _, cls = name.rpartition(".")
    extension = getattr(importlib.import_module(module), cls)
    for attribute in dir(extension):
        if not attribute.startswith("__") and hasattr(worker, attribute):
            raise ValueError(f"Worker class already defines '{attribute}'")
    return type(f"{worker.__name__}With{extension.__name__}", (worker, extension), {})
