"""TorchEngine: the base class of training engines on torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs
import torch

from dovetail.batch import Batch
from dovetail.dispatch import Future
from dovetail.errors import NumericsError, listed
from dovetail.interfaces import (
    TOKEN_OUTPUTS,
    ModelShape,
    Objective,
    ObjectiveSpec,
    OutputSpec,
    PluginConfig,
    TrainEngine,
    WeightManifest,
    check_outputs,
)
from dovetail.metrics import Last, Max, Mean, Metric
from dovetail.sections import ModelSection, TrainingSection
from dovetail_datasets import read_shape
from dovetail_stages import (
    build_objective,
    prepare_mini_batch,
    resolve_metrics,
    sample_names,
)
from dovetail_torch_engines.adapter_files import write_adapter
from dovetail_torch_engines.columns import check_columns, without_padding
from dovetail_torch_engines.quantize import quantization
from dovetail_torch_engines.random_states import RandomState
from dovetail_torch_engines.ranks import Ranks
from dovetail_torch_engines.sending import Sending
from dovetail_torch_engines.stored import bad_weight


@attrs.frozen
class PreparedUpdate:
    """An objective and the mini-batch on which the update computes it."""

    goal: Objective
    specs: tuple[OutputSpec, ...]
    """Specs of the model's outputs that the objective reads."""
    mini_batch: Batch
    """This rank's part of the mini-batch with all its columns, without padding samples."""
    prepared: Batch
    """The same samples as the objective prepared them, with only the columns that micro-batches need."""
    denominators: Mapping[str, float]
    """The loss's denominators over the whole mini-batch, by name."""


class TorchEngine(TrainEngine):
    """Base of engines whose model computes every token output on the ranks of a mesh, with an optional adapter (`config.lora`).

    A subclass loads, shards and runs the model, steps the optimizer, and defines how weights are sent and checkpoints staged.
    """

    _ranks: Ranks
    _random: RandomState
    _writing: Future[None] | None = None

    @property
    @abstractmethod
    def _vocabulary(self) -> int:
        """Size of the model's vocabulary."""

    @abstractmethod
    def _with_sending(self) -> Sending:
        """Return this rank's sender of weight updates, created on first use."""

    @abstractmethod
    def _staged(self, directory: Path, *, copy: bool) -> Callable[[], None]:
        """Return a function that writes the current training state. Collective.

        Args:
            directory: the directory of the state.
            copy: whether to copy the state first, so that training may continue before the returned function is called.
        """

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        """Return `ref_log_probs` if an adapter is trained, since the frozen base is the reference policy."""
        lora = getattr(config, "lora", None)
        return frozenset({"ref_log_probs"} if lora is not None else ())

    @classmethod
    def outputs(
        cls, config: PluginConfig, head: Literal["lm", "value"]
    ) -> Mapping[str, OutputSpec]:
        """Return, by name, the outputs that every engine has. A language model also has log-probabilities of K token ids at each token
        (`TOKEN_OUTPUTS`).
        """
        return {**super().outputs(config, head), **(TOKEN_OUTPUTS if head == "lm" else {})}

    @classmethod
    def shape(cls, model: ModelSection) -> ModelShape:
        return read_shape(model)

    @classmethod
    def bad_weight(cls, model: ModelSection, seconds: float) -> tuple[str, Path] | None:
        return bad_weight(model, seconds)

    def free_cache(self) -> None:
        if torch.device(self.context.device).type != "cpu":
            torch.accelerator.empty_cache()

    def weight_manifest(self, version: int) -> WeightManifest:
        return self._with_sending().manifest(version)

    def send_weights(self, version: int, manifest: WeightManifest) -> None:
        """Send the weights to the rollout; see `TrainEngine.send_weights`.

        Raises:
            WeightSyncError: there is no transport, version and manifest differ, or the model is a critic.
        """
        self._with_sending().send(version, manifest)

    def save(self, directory: Path) -> None:
        write = self._staged(Path(directory), copy=False)
        with self._ranks.together():
            write()

    def begin_save(self, directory: Path) -> None:
        write = self._staged(Path(directory), copy=True)
        self._writing = Future.in_thread(write, name="dovetail-checkpoint-files")

    def finish_save(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def quantization(self, method: str) -> Callable[[Path], None]:
        """Return a function that quantizes an exported model; see `TrainEngine.quantization`."""
        return quantization(method)

    def export_adapter(self, saved: Path, directory: Path) -> None:
        write_adapter(Path(saved), Path(directory), self.config.lora, self.context)

    @property
    def _role(self) -> str:
        return self.context.role or "actor"

    @property
    def _training(self) -> TrainingSection:
        return self.context.training or TrainingSection()

    def _check_outputs(
        self, wanted: Iterable[str | OutputSpec], batch: Batch
    ) -> tuple[OutputSpec, ...]:
        """Return the requested outputs as specs, after checking that the batch has the columns for them."""
        context = self.context
        specs = check_outputs(
            type(self), self.config, context.head, self._role, wanted, trained=context.trained
        )
        check_columns(batch, specs, self._vocabulary)
        return specs

    def _prepared(
        self, mini_batch: Batch, objective: ObjectiveSpec, also: Collection[str] = ()
    ) -> PreparedUpdate:
        """Build the objective and prepare the mini-batch for it; `also` names further columns that the engine needs. Collective.

        Raises:
            NumericsError: a column that the objective requires is not finite.
            ConfigError: the objective needs another head than the model has.
        """
        with self._ranks.together():
            goal = build_objective(objective, seed=self.context.seed)
            specs = self._check_outputs(objective.outputs, mini_batch)
            mini_batch = without_padding(mini_batch)
        with self._ranks.together():
            prepared, denominators = prepare_mini_batch(
                goal, objective, mini_batch, self.context.reduction, also
            )
        return PreparedUpdate(goal, specs, mini_batch, prepared, denominators)

    def _step_metrics(
        self, parts: Sequence[Mapping[str, Metric]], norm: float, lr: float
    ) -> dict[str, Metric]:
        """Return the metrics of an update: those of its micro-batches, the gradient norm, and the learning rate.

        Over the updates of a step, `grad_norm` is the mean and `grad_norm_max` the maximum: a large norm in a single update shows only
        in the maximum.
        """
        own: dict[str, Metric] = {
            f"{self._role}/grad_norm": Mean(norm, 1.0),
            f"{self._role}/grad_norm_max": Max(norm),
            f"{self._role}/lr": Last(lr),
        }
        return resolve_metrics(parts) | own

    def _traced(
        self, error: NumericsError, mini_batch: Batch, rows: Sequence[int]
    ) -> NumericsError:
        """Return the error, extended by the names of the samples that caused it: this rank's `rows`, and other ranks' rows. Collective."""
        samples = self._ranks.every(sample_names(mini_batch, rows))
        whence = (
            f"; the cause is {listed(samples)}"
            if samples
            else "; the loss of each single sample is finite"
        )
        return NumericsError(error.message + whence, hint=error.hint, sample_ids=samples)
