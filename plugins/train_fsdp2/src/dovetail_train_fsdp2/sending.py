"""The sender of this engine's weight updates."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dovetail.interfaces import PluginContext, WeightManifest
from dovetail_torch_engines import Ranks, Sending
from dovetail_train_fsdp2.forward import ModelRunner, PolicyRunner
from dovetail_train_fsdp2.weights import manifest_of, outgoing


class RunnerSending(Sending):
    """Sends a model's weights to the rollout, on one rank: all weights with the adapter merged, or only the adapter's."""

    def __init__(self, context: PluginContext, ranks: Ranks, runner: ModelRunner) -> None:
        super().__init__(
            context, ranks, critic=None if isinstance(runner, PolicyRunner) else runner.head
        )
        self._runner = runner

    def described(self, version: int) -> WeightManifest:
        return manifest_of(self._runner, version)

    def outgoing(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        return outgoing(self._runner, manifest)
