"""What the plugin sees of TensorRT-LLM, and nothing else: one protocol for each of its classes.

The type checker holds the plugin to these protocols, and a test holds them against the description of TensorRT-LLM in
`tests/contract/tensorrt_llm.json`: names, parameters, and what may be left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

DESCRIBED_AS = {
    "Engine": "tensorrt_llm._torch.async_llm.AsyncLLM",
    "Params": "tensorrt_llm.sampling_params.SamplingParams",
    "Request": "tensorrt_llm.llmapi.llm.RequestOutput",
    "Output": "tensorrt_llm.executor.result.CompletionOutput",
    "ChosenToken": "tensorrt_llm.executor.result.Logprob",
    "Worker": "tensorrt_llm.executor.ray.gpu_worker.RayGPUWorker",
    "Executor": "tensorrt_llm._torch.pyexecutor.py_executor.PyExecutor",
    "ModelEngine": "tensorrt_llm._torch.pyexecutor.model_engine.PyTorchModelEngine",
    "ModelLoader": "tensorrt_llm._torch.pyexecutor.model_loader.ModelLoader",
}
"""Each protocol's class in TensorRT-LLM."""


class ChosenToken(Protocol):
    """How likely a token was."""

    logprob: float


class Output(Protocol):
    """One sample."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, ChosenToken] | float] | None
    finish_reason: str | None


class Params(Protocol):
    """What is asked for with a prompt."""

    def _setup(self, tokenizer: Any, hf_model_config: Any, generation_config: Any) -> Any: ...


class Request(Protocol):
    """What `generate_async` returns: it is awaited for its end."""

    outputs: Sequence[Output]
    context_logits: Tensor | None
    error: str | None

    def __await__(self) -> Any: ...

    def abort(self) -> None: ...


class Engine(Protocol):
    """An asynchronous engine whose workers are Ray actors."""

    tokenizer: Any

    def setup_async(self) -> Awaitable[Any]: ...

    def generate_async(
        self,
        inputs: Sequence[int],
        sampling_params: Any = None,
        *,
        streaming: bool = False,
        cache_salt: str | None = None,
    ) -> Request: ...

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = ()
    ) -> Awaitable[Sequence[Any]]: ...

    def release(self, tags: Sequence[str]) -> Awaitable[None]: ...

    def resume(self, tags: Sequence[str]) -> Awaitable[None]: ...

    def shutdown(self) -> None: ...


def set_up(params: Params, engine: Engine) -> None:
    """Make tokens of stop strings. TensorRT-LLM does so by itself only where it is to set the end too."""
    params._setup(engine.tokenizer, None, None)  # noqa: SLF001 - there is no public way


class ModelLoader(Protocol):
    """Puts tensors of a checkpoint into a model, however that stores them."""

    def reload(
        self, model: nn.Module, weights: dict[str, Tensor], allow_partial_loading: bool = False
    ) -> None: ...


class ModelEngine(Protocol):
    """A worker's part of the model."""

    model: nn.Module
    model_loader: ModelLoader


class Executor(Protocol):
    """What runs the steps of a worker."""

    model_engine: ModelEngine
    resource_manager: Any

    def control_action(self) -> AbstractContextManager[Any]: ...

    def reset_prefix_cache(self) -> None: ...


class Worker(Protocol):
    """One worker, in a process of its own on one accelerator."""

    engine: Executor
    device_id: int


LATER = {
    "ModelLoader": ("begin_update_weights", "finalize_update_weights", "abort_update_weights"),
    "ModelEngine": ("unwrap_compiled_model_for_refit", "restore_compiled_model_after_refit"),
}
"""Methods that only some of the supported releases have, by protocol."""


def call_if_there(owner: ModelLoader | ModelEngine, method: str, *args: Any) -> None:
    """Call a method of `LATER` where this release has it."""
    found = getattr(owner, method, None)
    if found is not None:
        found(*args)
