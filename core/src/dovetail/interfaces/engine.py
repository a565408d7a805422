"""TrainEngine: a model on a mesh, with forward passes and updates of exactly one optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dovetail.dispatch.profiling import ProfiledWorker
from dovetail.dispatch.registration import Dispatch, nd, register
from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces.objective import OutputSpec
from dovetail.interfaces.plugin import ColumnPlugin, PluginConfig

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.interfaces.model_shape import ModelShape, UpdateSize, WorkingMemory
    from dovetail.interfaces.objective import ObjectiveSpec
    from dovetail.interfaces.transport import WeightManifest
    from dovetail.metrics import Metric
    from dovetail.sections import ModelSection


READS = ("prompt_ids", "response_ids", "response_mask", "temperature")
"""Columns that every forward pass and update reads."""
TOKEN_OUTPUTS = {
    "log_probs_at": OutputSpec(name="log_probs_at", inner=(0,)),
    "top_ids": OutputSpec(name="top_ids", dtype="int32", inner=(0,)),
    "top_log_probs": OutputSpec(name="top_log_probs", inner=(0,)),
}
"""Optional outputs for K token ids at each response token, [T, K], by name; an engine that computes them lists them in its `outputs`.

`log_probs_at` are the log-probabilities of the token ids in the integer column [T, K] that the spec reads, with gradient:
`OUTPUTS["log_probs_at"].sized(8, reads={"teacher_top_ids"})`. `top_ids` are the K most likely token ids, the likeliest first, and
`top_log_probs` their log-probabilities, both without gradient: `OUTPUTS["top_ids"].sized(8)`.
"""
OUTPUTS = {
    name: OutputSpec(name=name)
    for name in ("log_probs", "entropies", "values", "sum_pi_squared", "ref_log_probs")
} | TOKEN_OUTPUTS
"""Outputs of engines by name; each is a ragged column over response tokens.

`values` are the critic's, of the state before each token; `ref_log_probs` are the log-probabilities of the same model with its adapter
off. Outputs in `TOKEN_OUTPUTS` are requested with a size.
"""


class TrainEngine(ProfiledWorker, ColumnPlugin):
    """A model on a mesh of ranks. A method that is overridden keeps the dispatch mode that this class declares."""

    optimizers: ClassVar[frozenset[str] | None] = None
    """Names of the optimizers that the engine supports; None for any."""

    @classmethod
    def outputs(
        cls, config: PluginConfig, head: Literal["lm", "value"]
    ) -> Mapping[str, OutputSpec]:
        """Return the outputs that `forward` and `update` can compute for a model with this head, by name.

        By default, a value model gives `values`. A language model gives `log_probs`, `entropies`, `sum_pi_squared`, and each
        output that `provides(config)` names.
        """
        lm = {"log_probs", "entropies", "sum_pi_squared"} | (cls.provides(config) & OUTPUTS.keys())
        return {name: OUTPUTS[name] for name in sorted(lm if head == "lm" else {"values"})}

    @classmethod
    def bad_weight(cls, model: ModelSection, seconds: float) -> tuple[str, Path] | None:
        """Return the first weight in a model's files that holds NaN or infinity, and the weight's file. None if the engine finds no such
        weight within `seconds`, or can't check.
        """
        return None

    @classmethod
    def shape(cls, model: ModelSection) -> ModelShape:
        """Return a model's layers and sizes, read from its config alone, for planning memory and adapters.

        Raises:
            ModelError: the model can't be read, or the engine does not support this method.
        """
        raise ModelError(
            f"engine {cls.name!r} can't describe a model's layers: it does not define the class method `shape`",
            hint="define the method, or choose another engine",
        )

    @classmethod
    def working_memory(
        cls,
        config: PluginConfig,
        model: ModelSection,
        *,
        head: Literal["lm", "value"],
        trained: bool,
        ranks: int,
        size: UpdateSize,
    ) -> WorkingMemory | None:
        """Estimate a rank's memory during computation, in bytes, without weights, gradients and optimizer state. None if the engine can't
        estimate it.

        Args:
            config: the engine's config.
            model: the model's config section.
            head: the model's last layer.
            trained: whether a backward pass follows.
            ranks: the number of ranks of the mesh.
            size: the most that a rank computes at once and between two optimizer steps.
        """
        return None

    @register(dispatch_mode=nd("train"))
    @abstractmethod
    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
        """Compute outputs for the response tokens of a batch, without gradient.

        Args:
            batch: N samples with `prompt_ids`, `response_ids` (ragged), `response_mask`, `temperature` [N], and the
                columns that the outputs read.
            outputs: names from the engine's `outputs`; a spec for an output whose size the caller chooses.

        Returns:
            One ragged column for each output, with the output's dtype and inner shape, aligned with `response_ids`.
            Masked tokens hold 0. `log_probs` are nats under the full softmax of logits / temperature.

        Raises:
            ConfigError: the model can't compute a requested output.
            ColumnError: a column that an output reads is missing or unsuitable.
        """

    @register(dispatch_mode=nd("train"))
    @abstractmethod
    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        """Minimise the objective over the whole mini-batch with exactly one optimizer step.

        The result does not depend on how the mini-batch is cut into micro-batches or spread over ranks.
        Returns metrics that merge over ranks, named after the role: `actor/…`, `critic/…`.

        Raises:
            NumericsError: a column, the loss or the gradient is not finite; no step was taken. `sample_ids` lists the
                samples, if known.
            ConfigError: the objective needs an output that the model's head can't compute.
        """

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    @abstractmethod
    def weight_manifest(self, version: int) -> WeightManifest:
        """Return names (Hugging Face form), shapes and dtypes of the tensors that `send_weights` will send.

        Raises:
            WeightSyncError: the model is a value model, whose weights no rollout uses.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def send_weights(self, version: int, manifest: WeightManifest) -> None:
        """Send the weights through the context's transport, as the version `version`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Move parameters and optimizer state off the accelerator."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Move weights and optimizer state back to the accelerator."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_cache(self) -> None:
        """Release unused memory in the allocator's cache, before a rollout engine wakes on the same accelerator.

        Called between updates. Engines without such a cache do not override this method.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and random state below `directory`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, directory: Path) -> None:
        """Copy the training state to host memory, and write the copy below `directory` in a thread without collectives.

        By default, this method saves synchronously instead. `finish_save` is called before the next save, and before the worker is closed.
        """
        self.save(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait until this rank's files of `begin_save` are written. Called in a separate thread, while other methods may run.

        Raises:
            CheckpointError: a file can't be written.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote. The next update is bit-identical to that of an uninterrupted run."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_weights(self, directory: Path) -> None:
        """Write the weights alone below `directory`, in float32; with an adapter, the adapter alone.

        Another engine of this class reads the files in `average_weights`, on any number of ranks. Engines whose weights can follow those
        of another engine (capability `follows`) override this method.

        Raises:
            CheckpointError: the directory can't be written.
        """
        raise _cannot_follow(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def average_weights(self, directory: Path, share: float) -> None:
        """Move every weight towards its value in `directory`: w ← (1 − share) · w + share · w_written, in float32.

        The directory was written by `write_weights` of another engine. With an adapter, only the adapter's factors move. A share of 1
        copies bit for bit. Engines whose weights can follow those of another engine (capability `follows`) override this method.

        Raises:
            CheckpointError: a file can't be read, or belongs to another model or adapter; no weight has changed.
        """
        raise _cannot_follow(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model in Hugging Face format (`config.json`, safetensors, the tokenizer), with adapters merged.

        A value model is written with its head, so that an engine with the head "value" can start from these files.
        """

    def export_saved(self, saved: Path, directory: Path) -> None:
        """Write the model of the training state `saved` to `directory`, as `export` would. The engine need not be started.

        Engines that need not load the whole state override this method.

        Raises:
            CheckpointError: the state is damaged, or the directory can't be written.
        """
        self.start()
        try:
            self.load(saved)
            self.export(directory)
        finally:
            self.close()

    def export_adapter(self, saved: Path, directory: Path) -> None:
        """Write the low-rank adapter of the training state `saved` to `directory` in peft's format. The engine need not be started.

        Raises:
            ConfigError: the model is trained without an adapter, or the engine does not override this method.
            CheckpointError: the state is damaged, or the directory can't be written.
        """
        raise ConfigError(
            f"the engine {self.name!r} can't export an adapter separately from the model",
            hint="leave out --adapter: the whole model is exported then",
        )

    def quantization(self, method: str) -> Callable[[Path], None]:
        """Return a function that quantizes an exported model, in its folder, to the format that inference servers read.

        Args:
            method: the quantization method, such as `fp8`.

        Raises:
            ConfigError: the engine does not support the method, or a required package is not installed. By default, no method is supported.
            ModelError: (from the returned function) models of this kind can't be quantized.
        """
        raise ConfigError(
            f"the engine {self.name!r} can't quantize an exported model",
            hint="export without --quantize, and let the inference server quantize the model",
        )

    @classmethod
    def foreign_export(cls, source: Path) -> Callable[[Path], None] | None:
        """Return a function that writes the model of another program's checkpoint to a directory, as `export` would.

        None, the default, means that the engine does not recognise the checkpoint. The function raises a CheckpointError if the
        checkpoint is damaged or the directory can't be written.
        """
        return None


def _cannot_follow(engine: TrainEngine) -> ConfigError:
    return ConfigError(
        f"the engine {engine.name!r} can't update a model from the actor's weights: it lacks the capability 'follows'",
        hint="remove the keys ref.update and roles.NAME.update, or choose the engine fsdp2",
    )
