"""Fsdp2Engine: the training engine on PyTorch, in one process, on a CPU or one accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from dovetail.batch import Batch
from dovetail.config.sections import TrainingSection
from dovetail.errors import ConfigError, DispatchError, ModelError, WeightSyncError
from dovetail.interfaces.engine import OUTPUTS, TrainEngine
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.transport import WeightManifest
from dovetail.numerics import build_objective, resolve_metrics
from dovetail.telemetry.metrics import Last, Metric
from dovetail_train_fsdp2 import checkpoint
from dovetail_train_fsdp2.config import Fsdp2Config, Share
from dovetail_train_fsdp2.forward import Scorer
from dovetail_train_fsdp2.model import load_model, use_gradient_checkpointing
from dovetail_train_fsdp2.optim import Optimizer
from dovetail_train_fsdp2.packing import READS, Cut, check_columns, cut, lay_out
from dovetail_train_fsdp2.weights import manifest_of, wire_tensors

if TYPE_CHECKING:
    from dovetail.interfaces.transport import WeightSender, WeightTransport

COMPUTED = OUTPUTS - {"values"}


class Fsdp2Engine(TrainEngine):
    """One Hugging Face causal language model: float32 weights, compute in `model.dtype` through autocast.

    There is no dropout, so that scoring is deterministic and old and new log-probabilities compare.
    """

    name: ClassVar[str] = "fsdp2"
    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"deterministic", "offload"})
    Config = Fsdp2Config

    _scorer: Scorer | None = None
    _optimizer: Optimizer | None = None
    _sender: WeightSender | None = None
    _offloaded = False

    def start(self) -> None:
        """Load the model onto the context's device.

        Raises:
            ModelError: it can't be loaded, or can't be trained in its dtype.
        """
        section = self.context.model
        if section is None:
            raise ModelError("the training engine was given no model", hint="set model.path")
        if section.dtype == "float16" and self.context.role != "ref":
            raise ModelError(
                "model.dtype float16 can't be trained: small gradients vanish without loss scaling",
                hint="use model.dtype=bfloat16",
            )
        model = load_model(section, torch.device(self.context.device))
        self._scorer = Scorer(model, getattr(torch, section.dtype))
        if self.config.gradient_checkpointing:
            use_gradient_checkpointing(model)
            # Layers that compute their activations again keep no keys and values.
            self._scorer.can_share_prompts = False

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._scorer = self._optimizer = self._sender = None

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Batch:
        unknown = sorted(frozenset(outputs) - COMPUTED)
        if unknown:
            raise ConfigError(
                f"engine 'fsdp2' can't compute {unknown[0]!r}; it computes {', '.join(sorted(COMPUTED))}"
            )
        scorer = self._ready("forward")
        check_columns(batch)
        batch = batch.select(READS)
        mask = batch["response_mask"]
        columns = {name: np.zeros(len(mask.values), np.float32) for name in outputs}
        with torch.no_grad():
            for part in self._cut(batch):
                micro_batch = batch.take(part.rows_B)
                scores = scorer(lay_out(micro_batch, shared=part.shared), frozenset(outputs))
                places = _token_places(mask.offsets, part.rows_B)
                for name, values_T in scores.items():
                    columns[name][places] = values_T.float().cpu().numpy()
        return Batch(
            {name: mask.with_values(values) for name, values in columns.items()}, length=len(batch)
        )

    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        """As the interface says.

        Raises:
            NumericsError: the gradient is not finite; no step was taken.
        """
        scorer = self._ready("update")
        goal = build_objective(objective)
        denominators = goal.denominators(mini_batch, self.context.reduction)
        check_columns(mini_batch)
        mini_batch = mini_batch.select(sorted({*READS, *goal.requires}))
        optimizer = self._made_optimizer()
        parts: list[Mapping[str, Metric]] = []
        try:
            for part in self._cut(mini_batch):
                micro_batch = mini_batch.take(part.rows_B)
                scores = scorer(lay_out(micro_batch, shared=part.shared), goal.outputs)
                term = goal(scores, micro_batch, denominators)
                if term.loss.requires_grad:
                    term.loss.backward()  # type: ignore[no-untyped-call]
                parts.append(term.metrics)
            norm, lr = optimizer.step()
        except BaseException:
            # Half a mini-batch's gradients must not leak into the next update.
            optimizer.discard_gradients()
            raise
        return resolve_metrics(parts) | {"actor/grad_norm": Last(norm), "actor/lr": Last(lr)}

    def weight_manifest(self, version: int) -> WeightManifest:
        scorer = self._started()
        return manifest_of(scorer.model, version, scorer.dtype)

    def send_weights(self, version: int, manifest: WeightManifest) -> None:
        """As the interface says.

        Raises:
            WeightSyncError: there is no transport, or version and manifest differ.
        """
        scorer = self._started()
        if version != manifest.version:
            raise WeightSyncError(
                f"version {version} was asked for with the manifest of version {manifest.version}"
            )
        if self._sender is None:
            if self.context.transport is None:
                raise WeightSyncError(
                    f"role {self.context.role!r} has no weight transport to send through",
                    hint="set rollout.weight_transport",
                )
            self._sender = cast("WeightTransport", self.context.transport).sender()
        self._sender.send(manifest, wire_tensors(scorer.model, manifest))

    def offload(self) -> None:
        self._move(torch.device("cpu"), offloaded=True)

    def onload(self) -> None:
        self._move(torch.device(self.context.device), offloaded=False)

    def save(self, directory: Path) -> None:
        checkpoint.save(Path(directory), self._started().model, self._optimizer)

    def load(self, directory: Path) -> None:
        """As the interface says.

        Raises:
            CheckpointError: a file is missing or unreadable, or of another model.
        """
        scorer = self._started()
        trained = (Path(directory) / checkpoint.OPTIMIZER).exists()
        optimizer = self._made_optimizer() if trained else None
        checkpoint.load(Path(directory), scorer.model, optimizer)
        self._optimizer = optimizer

    def export(self, directory: Path) -> None:
        scorer = self._started()
        checkpoint.export(Path(directory), scorer.model, self.context.tokenizer, scorer.dtype)

    @property
    def _training(self) -> TrainingSection:
        return self.context.training or TrainingSection()

    def _cut(self, batch: Batch) -> list[Cut]:
        scorer = self._started()
        share: Share = self.config.share_prompts if scorer.can_share_prompts else "never"
        budget = self._training.max_tokens_per_micro_batch
        return cut(batch, budget, share, scorer.device.type)

    def _made_optimizer(self) -> Optimizer:
        """The optimizer, made when it is first needed: a model that only scores has none."""
        if self._optimizer is None:
            self._optimizer = Optimizer(
                self._started().model, self._training, self.context.total_steps
            )
        return self._optimizer

    def _started(self) -> Scorer:
        if self._scorer is None:
            raise DispatchError("the training engine has no model yet", hint="call start() first")
        return self._scorer

    def _ready(self, method: str) -> Scorer:
        if self._offloaded:
            raise DispatchError(
                f"{method}() was called while the model is offloaded", hint="call onload() first"
            )
        return self._started()

    def _move(self, device: torch.device, *, offloaded: bool) -> None:
        """Parameters, buffers and moments to a device; on a CPU there is nowhere else to be."""
        scorer = self._started()
        if torch.device(self.context.device).type == "cpu":
            return
        scorer.model.to(device)
        if self._optimizer is not None:
            self._optimizer.move(device)
        self._offloaded = offloaded
        if offloaded:
            torch.accelerator.empty_cache()


def _token_places(offsets_N1: np.ndarray, rows_B: np.ndarray) -> np.ndarray:
    """int64 [T]: where the packed tokens of these rows lie in the whole batch."""
    starts_B, lengths_B = offsets_N1[rows_B], np.diff(offsets_N1)[rows_B]
    shift_B = starts_B - (np.cumsum(lengths_B) - lengths_B)
    places_T: np.ndarray = np.arange(lengths_B.sum()) + np.repeat(shift_B, lengths_B)
    return places_T
