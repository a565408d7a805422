"""VllmRollout: the rollout engine on vLLM."""

from __future__ import annotations

from pathlib import Path

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext, WeightManifest
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_args import may_start_empty
from dovetail_rollout_vllm.fused import FusedLayers, Parts, refuse_shrunk
from dovetail_serving import Backend, ServingRollout


class VllmRollout(ServingRollout):
    """Rollout engine on vLLM: one vLLM engine in processes of this replica, or one vLLM server."""

    name = "vllm"
    api = ">=1.1,<2"
    engine = "vLLM"
    capabilities = frozenset(
        {
            "logprobs",
            "scores",
            "keeps_cache",
            "sleep",
            "discards_weights",
            "lora",
            "tensor_parallel",
            "server",
            "images",
        }
    )
    Config = VllmRolloutConfig

    def __init__(self, config: VllmRolloutConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._fused: FusedLayers | None = None
        self._names: frozenset[str] = frozenset()
        """Names of the tensors in the last full update."""

    def make_backend(self) -> Backend:
        if self.config.mode == "server":
            from dovetail_rollout_vllm.server_backend import VllmServerBackend

            return VllmServerBackend(self.config, self.context)
        from dovetail_rollout_vllm.engine_backend import EngineBackend

        return EngineBackend(self.config, self.context)

    def starts_empty(self) -> bool:
        return may_start_empty(self.config, self.context)

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        super().check_manifest(version, manifest)
        names = frozenset(tensor.name for tensor in manifest.tensors)
        if manifest.kind != "full" or self._backend is None or names == self._names:
            return
        refuse_shrunk(version, names, self._names)
        try:
            layers = self._layers()
        except RolloutError:
            return  # the engine has died; `receive_weights` reports it
        layers.refuse_incomplete(version, names)

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        super().receive_weights(version, manifest)
        if manifest.kind == "full":
            self._names = frozenset(tensor.name for tensor in manifest.tensors)

    def _layers(self) -> FusedLayers:
        """Return the layers that vLLM's model fuses, cached after the first call."""
        if self._fused is None:
            model = self.context.model
            place = None if model is None else Path(model.path)
            here = place if place is not None and place.is_dir() else None
            parts: Parts = getattr(self.backend, "parts", dict)()
            self._fused = FusedLayers(parts, here)
        return self._fused
