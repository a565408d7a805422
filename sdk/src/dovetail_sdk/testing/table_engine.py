"""TableEngine: a training engine whose policy is a table, so that tests of a run need no model.

Legend: N samples, T response tokens, packed end to end, V token ids of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from dovetail.batch import Batch
from dovetail.errors import WeightSyncError
from dovetail.interfaces import (
    OUTPUTS,
    ObjectiveSpec,
    OutputSpec,
    PluginConfig,
    PluginContext,
    TensorSpec,
    TrainEngine,
    WeightManifest,
    check_outputs,
)
from dovetail.metrics import Metric
from dovetail.sections import EngineSection
from dovetail_stages import build_objective, prepare_mini_batch, resolve_metrics

COMPUTES = frozenset({"log_probs", "entropies"})
VOCABULARY = 512


class TableEngine(TrainEngine):
    """A model with one logit for each token id, independent of context. Updates are plain gradient descent, so that a test can
    compute the expected weights.

    log π(w) = log softmax(logits / temperature)_w for token w

    Attributes:
        logits_V: float32 [V], the whole model; 0 at the start.
        updates: the mini-batches trained on, in order.
    """

    name = "table"
    api = ">=3.0,<4"
    capabilities = frozenset({"deterministic"})
    Config = EngineSection

    @classmethod
    def outputs(
        cls, config: PluginConfig, head: Literal["lm", "value"]
    ) -> Mapping[str, OutputSpec]:
        """Return `log_probs` and `entropies`, whatever the head."""
        return {name: OUTPUTS[name] for name in COMPUTES}

    def __init__(self, config: PluginConfig = None, context: PluginContext | None = None) -> None:
        super().__init__(config or EngineSection(name=self.name), context or PluginContext())
        self.logits_V = torch.zeros(VOCABULARY, requires_grad=True)
        self.updates: list[Batch] = []

    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
        with torch.no_grad():
            found = self._scores(batch, outputs)
        mask = batch["response_mask"]
        columns = {
            name: mask.with_values((values_T.numpy() * mask.values).astype(np.float32))
            for name, values_T in found.items()
        }
        return Batch(columns, length=len(batch))

    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        goal = build_objective(objective, seed=self.context.seed)
        prepared, denominators = prepare_mini_batch(
            goal, objective, mini_batch, self.context.reduction
        )
        scores = self._scores(prepared, objective.outputs)
        term = goal.term(scores, prepared, denominators, objective.scalars)
        (gradient_V,) = torch.autograd.grad(term.loss, [self.logits_V])
        rate = self.context.training.optim.lr if self.context.training else 1.0
        with torch.no_grad():
            self.logits_V -= rate * gradient_V
        self.updates.append(mini_batch)
        return resolve_metrics([term.metrics])

    def weight_manifest(self, version: int) -> WeightManifest:
        spec = TensorSpec(name="logits", shape=(VOCABULARY,), dtype="float32")
        return WeightManifest(version=version, tensors=(spec,))

    def send_weights(self, version: int, manifest: WeightManifest) -> None:
        if self.context.transport is None:
            raise WeightSyncError(
                "the table engine can't send weights: its context has no weight transport"
            )
        self.context.transport.sender().send(manifest, [("logits", self.logits_V.detach())])

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        np.save(directory / "logits.npy", self.logits_V.detach().numpy())

    def load(self, directory: Path) -> None:
        self.logits_V = torch.from_numpy(np.load(directory / "logits.npy")).requires_grad_()

    def export(self, directory: Path) -> None:
        self.save(directory)

    def _scores(self, batch: Batch, outputs: Iterable[str | OutputSpec]) -> dict[str, torch.Tensor]:
        """Return the scores by output name, float32 [T] each."""
        role, head, trained = self.context.role, self.context.head, self.context.trained
        specs = check_outputs(type(self), self.config, head, role, outputs, trained=trained)
        responses = batch["response_ids"]
        temperature_T = torch.from_numpy(
            np.repeat(np.asarray(batch["temperature"]), np.diff(responses.offsets))
        )
        log_probs_TV = (self.logits_V / temperature_T[:, None]).log_softmax(-1)
        chosen_T1 = torch.from_numpy(np.asarray(responses.values))[:, None]
        found = {"log_probs": log_probs_TV.gather(-1, chosen_T1)[:, 0]}
        found["entropies"] = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
        return {spec.name: found[spec.name] for spec in specs}
