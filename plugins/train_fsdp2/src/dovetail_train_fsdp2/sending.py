"""What this engine sends in a weight update: the scorer's tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dovetail.interfaces import PluginContext, WeightManifest
from dovetail.training import Ranks, Sending
from dovetail_train_fsdp2.forward import PolicyScorer, ModelRunner
from dovetail_train_fsdp2.weights import manifest_of, outgoing


class ScorerSending(Sending):
    """One rank's sender of a scorer's weights, or of its adapter's."""

    def __init__(self, context: PluginContext, ranks: Ranks, scorer: ModelRunner) -> None:
        super().__init__(
            context, ranks, critic=None if isinstance(scorer, PolicyScorer) else scorer.head
        )
        self._scorer = scorer

    def described(self, version: int) -> WeightManifest:
        return manifest_of(self._scorer, version)

    def outgoing(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        return outgoing(self._scorer, manifest)
