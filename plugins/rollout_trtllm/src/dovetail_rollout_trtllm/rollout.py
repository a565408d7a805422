"""TrtllmRollout: the rollout engine on TensorRT-LLM's server."""

from __future__ import annotations

from dovetail.interfaces import WeightManifest
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.names import refuse_other_tensors
from dovetail_serving import Backend, ServingRollout, model_of


class TrtllmRollout(ServingRollout):
    """Rollout engine on one `trtllm-serve` process, over its OpenAI-compatible API. NOT RUN ON THE REAL ENGINE YET.

    `trtllm-serve` takes no weights while it runs. An update is therefore written to disk as a checkpoint, and the server is
    restarted with this checkpoint. Sleep stops the server, and wake starts it.
    """

    name = "trtllm"
    aliases = ("tensorrt_llm",)
    api = ">=1.1,<2"
    engine = "TensorRT-LLM"
    capabilities = frozenset({"sleep", "tensor_parallel", "server"})
    Config = TrtllmRolloutConfig

    def make_backend(self) -> Backend:
        from dovetail_rollout_trtllm.backend import TrtllmBackend

        return TrtllmBackend(self.config, self.context)

    def starts_empty(self) -> bool:
        return self.context.weights_follow

    @property
    def receivers(self) -> int:
        """The number of receivers of weights, 1: this process writes the checkpoint for all ranks of the server."""
        return 1

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        super().check_manifest(version, manifest)
        refuse_other_tensors(model_of(self.context), (tensor.name for tensor in manifest.tensors))
