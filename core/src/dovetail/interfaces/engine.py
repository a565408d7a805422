"""TrainEngine: a model on a mesh, forward passes and exactly one optimizer step an update."""

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
    """One model on a mesh. Dispatch modes are declared here once; an override inherits them."""

    optimizers: ClassVar[frozenset[str] | None] = None
    """Names of the optimizers that it can step with; None for any."""

    @classmethod
    def outputs(
        cls, config: PluginConfig, head: Literal["lm", "value"]
    ) -> Mapping[str, OutputSpec]:
        """Return what `forward` and `update` can compute for a model with this head, by name.

        By default, a value model gives `values`. A language model gives the other outputs in `OUTPUTS`, without those in `TOKEN_OUTPUTS`,
        and `ref_log_probs` only where `provides(config)` names it.
        """
        lm = {"log_probs", "entropies", "sum_pi_squared"} | (cls.provides(config) & OUTPUTS.keys())
        return {name: OUTPUTS[name] for name in sorted(lm if head == "lm" else {"values"})}

    @classmethod
    def bad_weight(cls, model: ModelSection, seconds: float) -> tuple[str, Path] | None:
        """Return the first weight in a model's files that holds NaN or infinity, and its file. None where no such weight was found within
        `seconds`, or the engine can't check.
        """
        return None

    @classmethod
    def shape(cls, model: ModelSection) -> ModelShape:
        """Return a model's layers and sizes, read from its config alone: memory and adapters are planned from it.

        Raises:
            ModelError: the model can't be read, or the engine does not support this. A plan then states neither.
        """
        raise ModelError(
            f"engine {cls.name!r} does not say which layers its models have",
            hint="define its class method `shape`",
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
        """Estimate the bytes that a rank needs during computation, besides weights, gradients and optimizer state; None where the engine
        can't estimate them.

        Args:
            config: the engine's config.
            model: the model's section.
            head: the model's last layer.
            trained: whether a backward pass follows.
            ranks: the number of ranks of the mesh.
            size: what a rank computes at once, and between two optimizer steps.
        """
        return None

    @register(dispatch_mode=nd("train"))
    @abstractmethod
    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
        """Score response tokens without gradient.

        Args:
            batch: has `prompt_ids`, `response_ids` (ragged), `response_mask`, `temperature` [N], and the columns that
                the outputs read.
            outputs: names of the engine's `outputs`, or a spec for an output whose size is chosen.

        Returns:
            One ragged column an output, of its dtype and inner shape, aligned with `response_ids`; masked tokens hold 0.
            `log_probs` are nats under the full softmax of logits / temperature.

        Raises:
            ConfigError: the model does not give such an output.
            ColumnError: a column that an output reads is missing or not as the output needs it.
        """

    @register(dispatch_mode=nd("train"))
    @abstractmethod
    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        """Minimise the objective over the whole mini-batch with exactly one optimizer step.

        The result does not depend on how the mini-batch is cut into micro-batches or spread over ranks.
        Returns metrics that merge over ranks, named after the role: `actor/…`, `critic/…`.

        Raises:
            NumericsError: a column, the loss or the gradient is not finite; no step was taken. `sample_ids` names the
                samples, as far as known.
            ConfigError: the objective asks for outputs that the model's head does not give.
        """

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    @abstractmethod
    def weight_manifest(self, version: int) -> WeightManifest:
        """Return names (Hugging Face form), shapes and dtypes of the tensors that `send_weights` will send.

        Raises:
            WeightSyncError: the head is "value": no rollout takes the weights of a critic.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def send_weights(self, version: int, manifest: WeightManifest) -> None:
        """Send the weights through the context's transport as `version`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Move parameters and optimizer state off the accelerator."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Move weights and optimizer state back to the accelerator."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_cache(self) -> None:
        """Release the unused memory in the allocator's cache, for a rollout that wakes next.

        Called between updates; an engine without such a cache does not override it.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and random state below `directory`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, directory: Path) -> None:
        """Copy the state that `save` writes to host memory, and write it below `directory` in a thread that takes part in no collective. An
        engine that does not override this saves synchronously.

        `finish_save` is called before the next save, and before the worker is closed.
        """
        self.save(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait until this rank's files of `begin_save` are written. Called in another thread than other methods, which may
        run meanwhile.

        Raises:
            CheckpointError: a file can't be written.
        """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what `save` wrote: the next update is bit-identical to that of an uninterrupted run."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_weights(self, directory: Path) -> None:
        """Write the weights alone below `directory`, in float32, for `average_weights` of another engine of this class, on any
        number of ranks; with an adapter, the adapter. Engines with the capability `follows` override it.

        Raises:
            CheckpointError: the directory can't be written.
        """
        raise _cannot_follow(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def average_weights(self, directory: Path, share: float) -> None:
        """Move every weight towards the one that `write_weights` wrote: w ← (1 − share) · w + share · w_written, in float32; with an
        adapter, its factors. A share of 1 copies the weights bit for bit. Engines with the capability `follows` override it.

        Raises:
            CheckpointError: a file can't be read, or is of another model or adapter; no weight was changed.
        """
        raise _cannot_follow(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model in Hugging Face format (`config.json`, safetensors, the tokenizer), with adapters merged; a value model is
        written with its head, so that an engine with the head "value" can start from it.
        """

    def export_saved(self, saved: Path, directory: Path) -> None:
        """Write the model of the training state `saved` to `directory` as `export` would; the engine need not be started.

        Engines that need not load the whole state override this.

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
        """Write the low-rank adapter of the training state `saved` to `directory`, in peft's format; the engine need not be started.

        Raises:
            ConfigError: the model is trained without an adapter, or the engine does not override this method.
            CheckpointError: the state is damaged, or the directory can't be written.
        """
        raise ConfigError(
            f"the engine {self.name!r} has no adapter separate from its model",
            hint="leave out --adapter: the whole model is exported then",
        )

    def quantization(self, method: str) -> Callable[[Path], None]:
        """Return a function that quantizes an exported model, in its folder, to the format that inference servers read.

        Args:
            method: such as `fp8`.

        Raises:
            ConfigError: the engine does not support the method (by default none), or a package that it needs is not
                installed.
            ModelError: raised by the returned function: models of this kind can't be quantized.
        """
        raise ConfigError(
            f"the engine {self.name!r} does not quantize what it exports",
            hint="export without --quantize, and let the server quantize",
        )

    @classmethod
    def foreign_export(cls, source: Path) -> Callable[[Path], None] | None:
        """Return a function that writes the model of another program's checkpoint to a directory, as `export` would; None where the engine
        does not recognise the checkpoint (the default). The function raises a CheckpointError where the checkpoint is damaged, or the
        directory can't be written.
        """
        return None


def _cannot_follow(engine: TrainEngine) -> ConfigError:
    return ConfigError(
        f"the engine {engine.name!r} lacks the capability 'follows'",
        hint="leave out `update` of ref and of roles",
    )
