"""TrtllmRollout: TensorRT-LLM as a rollout engine."""

from __future__ import annotations

from functools import cached_property

from dovetail.interfaces import WeightManifest
from dovetail.serving import Backend, ServingRollout, starts_empty
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.names import TensorNames


class TrtllmRollout(ServingRollout):
    """One TensorRT-LLM engine. NOT RUN ON THE REAL ENGINE YET: built against its source (1.3.0rc21 to 1.4.0rc1).

    What was tested, and how: every class, argument and field of TensorRT-LLM that is used, against a description taken from
    that source; and the rollout suite against a stand-in that speaks this description, with a small transformers model. What
    remains to be tried on the real engine stands in the package's README.
    """

    name = "trtllm"
    aliases = ("tensorrt_llm",)
    api = ">=1.1,<2"
    engine = "TensorRT-LLM"
    capabilities = frozenset({"logprobs", "scores", "sleep", "tensor_parallel", "server"})
    Config = TrtllmRolloutConfig

    def make_backend(self) -> Backend:
        from dovetail_rollout_trtllm.backend import TrtllmBackend

        return TrtllmBackend(self.config, self.context)

    def starts_empty(self) -> bool:
        return starts_empty(self.config, self.context)

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        super().check_manifest(version, manifest)
        if self._names is not None:
            self._names.refuse_other(version, [tensor.name for tensor in manifest.tensors])

    @cached_property
    def _names(self) -> TensorNames | None:
        return None if self.context.model is None else TensorNames.of(self.context.model)
