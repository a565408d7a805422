"""Fsdp2Engine: the training engine on PyTorch, in one process or sharded over many, on CPUs or accelerators."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.errors import DispatchError, DovetailError, NumericsError
from dovetail.interfaces import (
    READS,
    ObjectiveSpec,
    OutputSpec,
    PluginConfig,
    PluginContext,
    UpdateSize,
    WorkingMemory,
)
from dovetail.metrics import Mean, Metric
from dovetail.random_streams import stream_seed
from dovetail.sections import ModelSection
from dovetail_torch_engines import (
    RandomState,
    TorchEngine,
    columns_read,
    empty_columns,
    token_places,
    was_trained,
)
from dovetail_train_fsdp2 import checkpoint
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.export import export, export_saved
from dovetail_train_fsdp2.failures import all_failing_rows
from dovetail_train_fsdp2.footprint import UNTRACEABLE, working_memory
from dovetail_train_fsdp2.forward import ModelRunner
from dovetail_train_fsdp2.layout import lay_out
from dovetail_train_fsdp2.memory import use_expandable_segments
from dovetail_train_fsdp2.optim import ShardedOptimizer
from dovetail_train_fsdp2.packing import MicroBatchPlan, cut
from dovetail_train_fsdp2.sending import RunnerSending
from dovetail_train_fsdp2.sharding import Sharding
from dovetail_train_fsdp2.start import load_runner, ranks_of
from dovetail_train_fsdp2.verl import checkpoint_in, export_verl
from dovetail_train_fsdp2.vision import IMAGE_MASK, MEDIA, cut_with_images, has_images


class Fsdp2Engine(TorchEngine):
    """Trains one Hugging Face causal language model, or a critic's value model, with float32 weights and compute in `model.dtype`.

    There is no dropout, so that scoring is deterministic and old and new log-probabilities are comparable. On several ranks every
    call but `weight_manifest` is collective, and an error on one rank is raised on all ranks.
    """

    name = "fsdp2"
    api = ">=3.0,<4"
    capabilities = frozenset(
        {"deterministic", "offload", "value_head", "lora", "images", "follows"}
    )
    Config = Fsdp2Config

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
        assert isinstance(config, Fsdp2Config)
        context = PluginContext(model=model, head=head, trained=trained)
        try:
            return working_memory(config, context, ranks=ranks, size=size)
        except (DovetailError, *UNTRACEABLE):
            return None  # preflight rules report the error

    _runner: ModelRunner | None = None
    _sharding: Sharding | None = None
    _optimizer: ShardedOptimizer | None = None
    _sending: RunnerSending | None = None
    _offloaded = False

    def start(self) -> None:
        """Load the model onto the context's device.

        Raises:
            ModelError: the model can't be loaded, or can't be trained in its dtype.
            PluginNeedsError: the config sets `lora`, and peft is not installed.
            ConfigError: the adapter does not fit the model, or the config's sizes do not divide the ranks.
            DispatchError: the process group is missing or differs from the mesh in size.
        """
        use_expandable_segments(torch.device(self.context.device))
        self._ranks = ranks_of(self.config, self.context)
        seed = stream_seed(self.context.seed, "torch", self._role, self.context.rank)
        self._random = RandomState(torch.device(self.context.device), seed)
        with self._random.in_force():
            self._runner, self._sharding = load_runner(self.config, self.context, self._ranks)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.close()
        self._runner = self._sharding = self._optimizer = self._sending = None
        if torch.device(self.context.device).type != "cpu":
            # Sharded modules and their hooks refer to each other: only the garbage collector frees them.
            gc.collect()
            torch.accelerator.empty_cache()

    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
        runner = self._ready("forward")
        with self._ranks.together():
            specs = self._check_outputs(outputs, batch)
            images = [name for name in (MEDIA, IMAGE_MASK) if name in batch]
            kept = dict.fromkeys([*READS, *columns_read(specs), *images])
            batch = batch.select(list(kept))
            cuts = self._cut(batch)
        mask = batch["response_mask"]
        columns = empty_columns(len(mask.values), specs)
        try:
            with torch.no_grad(), self._random.in_force():
                for part in self._cut_alike(batch, cuts):
                    micro_batch = batch.take(part.rows_B)
                    layout = lay_out(micro_batch, specs, shared=part.shared, packed=part.packed)
                    places = token_places(mask.offsets, part.rows_B)
                    for name, values in runner(layout, specs).items():
                        columns[name][places] = values.cpu().numpy()
        except BaseException:
            self._recover()
            raise
        self._free()
        return Batch(
            {name: mask.with_values(values) for name, values in columns.items()}, length=len(batch)
        )

    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        """Take one optimizer step; see `TrainEngine.update`. Samples that the column `padding` marks have no effect.

        Raises:
            NumericsError: a column, the loss or the gradient is not finite; no step was taken, and the error names the samples.
            ConfigError: the model lacks the head that the objective needs.
        """
        runner = self._ready("update")
        made = self._prepared(mini_batch, objective, also=(MEDIA, IMAGE_MASK))
        prepared, specs, denominators = made.prepared, made.specs, made.denominators
        with self._ranks.together():
            cuts = self._cut(prepared, unit=objective.unit)
        cuts = self._cut_alike(prepared, cuts, objective.unit)
        # If one rank has images, all ranks must run the vision tower, whose gradients are reduced over all.
        runner.vision_everywhere = self._ranks.size > 1 and bool(
            self._ranks.largest(int(has_images(prepared)))
        )
        optimizer = self._made_optimizer()
        parts: list[Mapping[str, Metric]] = []
        finite: list[torch.Tensor] = []
        padding = fed = 0
        try:
            with self._random.in_force():
                for number, part in enumerate(cuts, start=1):
                    micro_batch = prepared.take(part.rows_B)
                    layout = lay_out(micro_batch, specs, shared=part.shared, packed=part.packed)
                    padding, fed = padding + layout.padding, fed + layout.fed.tokens
                    scores = runner(layout, specs)
                    term = made.goal.term(scores, micro_batch, denominators, objective.scalars)
                    self._backward(term.loss, scores, last=number == len(cuts))
                    parts.append(term.metrics)
                    finite.append(term.finite)
        except BaseException:
            # Gradients of part of a mini-batch must not enter the next update.
            optimizer.discard_gradients()
            self._recover()
            raise
        try:
            norm, lr = optimizer.step(torch.stack(finite).all())
        except NumericsError as error:
            with self._random.in_force():
                rows = all_failing_rows(runner, made.goal, objective, prepared, denominators, cuts)
            self._free()
            raise self._traced(error, made.mini_batch, rows) from None
        except BaseException:
            optimizer.discard_gradients()
            raise
        share = {f"{self._role}/padding_share": Mean(padding, max(fed, 1))}
        return self._step_metrics(parts, norm, lr) | share

    def offload(self) -> None:
        self._move(torch.device("cpu"), offloaded=True)

    def onload(self) -> None:
        self._move(torch.device(self.context.device), offloaded=False)

    def load(self, directory: Path) -> None:
        """Load a training state; see `TrainEngine.load`.

        Raises:
            CheckpointError: a file is missing or unreadable, or belongs to another model.
        """
        runner = self._started()
        with self._ranks.together():
            trained = was_trained(Path(directory))
        optimizer = self._made_optimizer() if trained else None
        checkpoint.load(Path(directory), runner, optimizer, self._ranks, self._random)
        self._optimizer = optimizer

    def write_weights(self, directory: Path) -> None:
        runner = self._ready("write_weights")
        write = checkpoint.staged(
            Path(directory), runner, None, self._ranks, self._random, copy=False
        )
        with self._ranks.together():
            write()

    def average_weights(self, directory: Path, share: float) -> None:
        checkpoint.average(Path(directory), self._ready("average_weights"), self._ranks, share)

    def export(self, directory: Path) -> None:
        export(Path(directory), self._started(), self.context.tokenizer, self._ranks)

    def export_saved(self, saved: Path, directory: Path) -> None:
        """Export a saved training state as a Hugging Face model.

        If the architecture's tensors have the same names and shapes in memory as in its files, at most one file's tensors are in memory.
        """
        section = self.context.model
        if section is None or not export_saved(
            Path(saved), Path(directory), self.config, self.context, section
        ):
            super().export_saved(saved, directory)

    @classmethod
    def foreign_export(cls, source: Path) -> Callable[[Path], None] | None:
        """Return a function that exports a checkpoint of verl's FSDP workers to a given folder, with at most one file's tensors in memory.

        None if `source` is not such a checkpoint.
        """
        folder = checkpoint_in(source)
        return None if folder is None else partial(export_verl, folder)

    def _staged(self, directory: Path, *, copy: bool) -> Callable[[], None]:
        return checkpoint.staged(
            directory, self._started(), self._optimizer, self._ranks, self._random, copy=copy
        )

    @property
    def _vocabulary(self) -> int:
        return self._started().vocabulary

    def _cut(self, batch: Batch, at_least: int = 1, unit: Unit = "sample") -> list[MicroBatchPlan]:
        runner = self._started()
        budget = self._training.max_tokens_per_micro_batch
        means = runner.means(self.config)
        if has_images(batch):
            together = self.config.sequence_parallel_size
            return cut_with_images(batch, budget, means, at_least, unit, together=together)
        return cut(batch, budget, means, at_least, unit)

    def _cut_alike(
        self, batch: Batch, cuts: list[MicroBatchPlan], unit: Unit = "sample"
    ) -> list[MicroBatchPlan]:
        """Return `cuts`; if another rank has more micro-batches, divide the batch again into as many as that rank has. Collective.

        All ranks must run equally many micro-batches, since each runs collectives.
        """
        most = self._ranks.largest(len(cuts))
        return cuts if len(cuts) == most else self._cut(batch, at_least=most, unit=unit)

    def _backward(
        self, loss: torch.Tensor, scores: Mapping[str, torch.Tensor], *, last: bool
    ) -> None:
        if self._sharding is None:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            return
        self._sharding.before_backward(last=last)
        if not loss.requires_grad:
            # A loss without a gradient still needs a backward pass: the other ranks wait for its collectives.
            loss = sum((s.sum() for s in scores.values() if s.requires_grad), loss) * 0
        loss.backward()  # type: ignore[no-untyped-call]

    def _free(self) -> None:
        if self._sharding is not None:
            self._sharding.free()

    def _recover(self) -> None:
        if self._sharding is not None:
            self._sharding.recover()

    def _made_optimizer(self) -> ShardedOptimizer:
        """Return the optimizer, made on first use: a model that only scores has none."""
        if self._optimizer is None:
            self._optimizer = ShardedOptimizer(
                self._started().model,
                self._started().output_layer,
                self._training,
                self.context.total_steps,
                self._ranks,
                self._sharding.replicas if self._sharding is not None else 1,
            )
        return self._optimizer

    def _started(self) -> ModelRunner:
        if self._runner is None:
            raise DispatchError("the training engine has no model yet", hint="call start() first")
        return self._runner

    def _with_sending(self) -> RunnerSending:
        runner = self._started()
        if self._sending is None:
            self._sending = RunnerSending(self.context, self._ranks, runner)
        return self._sending

    def _ready(self, method: str) -> ModelRunner:
        if self._offloaded:
            raise DispatchError(
                f"{method}() was called while the model is offloaded", hint="call onload() first"
            )
        return self._started()

    def _move(self, device: torch.device, *, offloaded: bool) -> None:
        """Move parameters, buffers and moments to a device, unless they stay in host memory; do nothing if the engine runs on the CPU.

        Args:
            device: the device to move to.
            offloaded: whether the model counts as offloaded afterwards, so that passes and updates are refused.
        """
        runner = self._started()
        if torch.device(self.context.device).type == "cpu":
            return
        kept = self._sharding.state_device if self._sharding is not None else device
        if kept.type != "cpu":
            runner.to(device)
            if self._optimizer is not None:
                self._optimizer.move(device)
        self._offloaded = offloaded
        if offloaded:
            # torch's allocator caches freed memory; the rollout's process gets the memory only after the cache is emptied.
            self.free_cache()
