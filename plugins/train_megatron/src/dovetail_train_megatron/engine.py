"""MegatronEngine: the training engine on Megatron-Core, with data, tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.errors import DispatchError, ModelError, NumericsError, PluginNeedsError
from dovetail.interfaces import READS, ObjectiveSpec, OutputSpec, PluginContext, WeightManifest
from dovetail.metrics import Metric
from dovetail.random_streams import stream_seed
from dovetail.sections import ModelSection
from dovetail_torch_engines import (
    RandomState,
    Ranks,
    Sending,
    TorchEngine,
    columns_read,
    was_trained,
)
from dovetail_train_megatron import checkpoint, pipeline
from dovetail_train_megatron.adapter import MegatronAdapter
from dovetail_train_megatron.architecture import Architecture
from dovetail_train_megatron.checkpoint import start_adapter
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.export import export
from dovetail_train_megatron.names import TensorTable
from dovetail_train_megatron.needs import imported, quieten
from dovetail_train_megatron.network import HEADS, Network
from dovetail_train_megatron.offload import TensorOffloader
from dovetail_train_megatron.optim import OPTIMIZERS, MegatronOptimizer
from dovetail_train_megatron.parallel import Parallel
from dovetail_train_megatron.scoring import PackedMicroBatches, all_failing_rows, packed, scored
from dovetail_train_megatron.weights import Receiving, manifest_of, outgoing, read_weights


class MegatronEngine(TorchEngine):
    """Trains one language model, or a critic's value model, divided over ranks as configured.

    The tensor-, pipeline- and context-parallel ranks of one copy of the model get the same samples; of their scores and metrics, those
    of the last stage's first rank are used. Every call but `weight_manifest` is collective, and an error on one rank is raised on all
    ranks.
    """

    name = "megatron"
    api = ">=3.0,<4"
    capabilities = frozenset({"offload", "value_head", "lora"})
    optimizers: ClassVar[frozenset[str] | None] = OPTIMIZERS
    Config = MegatronConfig

    _parallel: Parallel | None = None
    _network: Network | None = None
    _table: TensorTable
    _offloader: TensorOffloader
    _optimizer: MegatronOptimizer | None = None
    _sending: NetworkSending | None = None

    def start(self) -> None:
        """Load this rank's shard of the model onto the context's device.

        Raises:
            ModelError: the model can't be loaded, or Megatron lacks its architecture.
            PluginNeedsError: megatron-core or mbridge is missing, or there is no CUDA device.
            ConfigError: the parallel sizes do not divide the model or differ from the mesh, or the adapter does not fit the model.
            DispatchError: the process group is missing or differs from the mesh in size.
        """
        section = self.context.model
        if section is None:
            raise ModelError("the training engine was given no model", hint="set model.path")
        self._check_device()
        self._parallel = Parallel(self.config, self.context)
        try:
            self._load(section, self._parallel)
        except BaseException:
            # A partly loaded engine must release Megatron's layout; an error in closing must not hide the first one.
            with suppress(Exception):
                self.close()
            raise

    def close(self) -> None:
        if self._sending is not None:
            self._sending.close()
        parallel, self._parallel = self._parallel, None
        if parallel is not None:
            parallel.leave()
        self._network = self._optimizer = self._sending = None
        self.__dict__.pop("_table", None)
        self.__dict__.pop("_offloader", None)
        if torch.device(self.context.device).type != "cpu":
            # Modules and their hooks refer to each other: only the garbage collector frees them.
            gc.collect()
            torch.accelerator.empty_cache()

    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
        """Compute outputs for every response token; see `TrainEngine.forward`. On pipeline stages before the last, all outputs are 0."""
        network = self._ready("forward")
        with self._ranks.together():
            specs = self._check_outputs(outputs, batch)
            batch = batch.select([*READS, *columns_read(specs)])
        with self._random.in_force():
            return scored(network, batch, self._packed(network, batch, specs), specs)

    def update(self, mini_batch: Batch, objective: ObjectiveSpec) -> Mapping[str, Metric]:
        """Take one optimizer step; see `TrainEngine.update`. Samples that the column `padding` marks have no effect.

        Raises:
            NumericsError: a column, the loss or the gradient is not finite; no step was taken, and the error names the samples.
            ConfigError: the model lacks the head that the objective needs.
        """
        network = self._ready("update")
        made = self._prepared(mini_batch, objective)
        cuts = self._packed(network, made.prepared, made.specs, objective.unit)
        micro_batches = [made.prepared.take(rows) for rows in cuts.rows]
        optimizer = self._made_optimizer()
        optimizer.begin()
        try:
            with self._random.in_force():
                terms = pipeline.descend(
                    network,
                    cuts.packs,
                    made.specs,
                    lambda i, scores: made.goal.term(
                        scores, micro_batches[i], made.denominators, objective.scalars
                    ),
                    optimizer.module,
                )
        except BaseException:
            # Gradients of part of a mini-batch must not enter the next update.
            optimizer.discard_gradients()
            raise
        finite = not terms or bool(torch.stack([term.finite for term in terms]).all())
        try:
            norm, lr = optimizer.step(finite)
        except NumericsError as error:
            with self._random.in_force():
                rows = all_failing_rows(
                    network, made.goal, objective, made.prepared, made.denominators, cuts
                )
            raise self._traced(error, made.mini_batch, rows) from None
        return self._step_metrics([term.metrics for term in terms], norm, lr)

    def offload(self) -> None:
        self._started()
        self._offloader.offload(self._optimizer)

    def onload(self) -> None:
        self._started()
        self._offloader.onload(self._optimizer)

    def load(self, directory: Path) -> None:
        """Load a training state, written in any layout or by the engine `fsdp2`; see `TrainEngine.load`.

        Raises:
            CheckpointError: a file is missing or unreadable, or belongs to another model.
        """
        network = self._ready("load")
        with self._ranks.together():
            trained = was_trained(Path(directory))
        optimizer = self._made_optimizer() if trained else self._optimizer
        checkpoint.load(Path(directory), network, self._table, optimizer, self._ranks, self._random)

    def export(self, directory: Path) -> None:
        network = self._ready("export")
        export(
            Path(directory),
            network,
            self._table,
            self._section,
            self.context.tokenizer,
            self._ranks,
        )

    def _load(self, section: ModelSection, parallel: Parallel) -> None:
        self._ranks = Ranks(self.context.mesh, self.context.rank)
        # Tensor-parallel ranks have one seed: they compute the same activations between their matrix products.
        place = (parallel.dp_rank, parallel.pp_rank, parallel.cp_rank)
        seed = stream_seed(self.context.seed, "torch", self._role, *place)
        self._random = RandomState(torch.device(self.context.device), seed)
        with self._random.in_force():
            network, self._table = load_network(
                self.config, self.context, section, parallel, self._ranks, seed
            )
        self._network, self._offloader = network, TensorOffloader(network)

    def _staged(self, directory: Path, *, copy: bool) -> Callable[[], None]:
        return checkpoint.staged(
            directory,
            self._ready("save"),
            self._table,
            self._optimizer,
            self._ranks,
            self._random,
            copy=copy,
        )

    @property
    def _section(self) -> ModelSection:
        section: ModelSection | None = self.context.model
        assert section is not None
        return section

    @property
    def _vocabulary(self) -> int:
        return int(self._started().architecture.hf.vocab_size)

    def _check_device(self) -> None:
        check_device(self.context)

    def _packed(
        self,
        network: Network,
        batch: Batch,
        outputs: Sequence[OutputSpec],
        unit: Unit = "sample",
    ) -> PackedMicroBatches:
        budget = self._training.max_tokens_per_micro_batch
        return packed(network, batch, budget, self._ranks, outputs, unit)

    def _made_optimizer(self) -> MegatronOptimizer:
        """Return the optimizer, made on first use: a model that only scores has none."""
        if self._optimizer is None:
            network = self._started()
            self._optimizer = MegatronOptimizer(
                network,
                self._training,
                self.context.total_steps,
                self._ranks,
                overlap=self.config.overlap_gradients,
            )
            if self._optimizer.half and network.adapter is None:
                # The modules have rounded weights: the optimizer reads its float32 weights from the checkpoint.
                masters = self._optimizer
                with self._ranks.together():
                    read_weights(
                        network,
                        self._table,
                        self._section,
                        lambda parameter, values: masters.fill(parameter, "weight", values),
                    )
        return self._optimizer

    def _started(self) -> Network:
        if self._network is None:
            raise DispatchError("the training engine has no model yet", hint="call start() first")
        return self._network

    def _with_sending(self) -> NetworkSending:
        network = self._started()
        if self._sending is None:
            self._sending = NetworkSending(self.context, self._ranks, network, self._table)
        return self._sending

    def _ready(self, method: str) -> Network:
        network = self._started()
        if self._offloader.offloaded:
            raise DispatchError(
                f"{method}() was called while the model is offloaded", hint="call onload() first"
            )
        return network


class NetworkSending(Sending):
    """Sends a network's weights to the rollout, on one rank.

    If the manifest counts the receivers on each machine (`receivers_on`), the first rank of each machine sends to its machine's receivers.
    Otherwise rank 0 sends to all receivers.
    """

    def __init__(
        self, context: PluginContext, ranks: Ranks, network: Network, table: TensorTable
    ) -> None:
        super().__init__(
            context, ranks, critic=None if network.head == "lm" else HEADS[network.head]
        )
        self._network, self._table = network, table

    def described(self, version: int) -> WeightManifest:
        return manifest_of(self._network, self._table, version)

    def outgoing(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        to: Receiving = "all" if manifest.receivers_on else 0
        return outgoing(self._network, self._table, self._ranks.rank, to)


def check_device(context: PluginContext) -> None:
    """Check that the context's device is a CUDA device, which Megatron needs.

    Raises:
        PluginNeedsError: the device is not a CUDA device.
    """
    if torch.device(context.device).type != "cuda":
        raise PluginNeedsError(
            f"the engine megatron needs a CUDA device, but role {context.role or 'actor'!r} is on {context.device}",
            hint="use the engine fsdp2 on a CPU",
        )


def load_network(
    config: MegatronConfig,
    context: PluginContext,
    section: ModelSection,
    parallel: Parallel,
    ranks: Ranks,
    seed: int,
) -> tuple[Network, TensorTable]:
    """Load this rank's shard of the model, and return it with the table of its tensors. Collective. A model that this run does not train
    gets no adapter.

    The seed initialises torch's generator of the device, and Megatron's generators for tensor and expert parallelism.

    Raises:
        ModelError: the model can't be loaded, or Megatron lacks its architecture.
        PluginNeedsError: megatron-core or mbridge is missing.
        ConfigError: the parallel sizes do not divide the model, or the adapter does not fit the model.
    """
    quieten()
    # With sequence parallelism, Megatron needs its random generators even without dropout.
    imported("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(seed)
    with ranks.together():
        architecture = Architecture(section, config, parallel, context.head)
        device = torch.device(context.device)
        network = Network(architecture, config, parallel, device, context.head)
        if config.lora is not None and context.trained:
            network.adapter = MegatronAdapter(network, config.lora, seed=context.seed)
    table = TensorTable(network, context.rank)
    with ranks.together():
        had_head = read_weights(network, table, section, _copied)
    if network.adapter is not None:
        network.adapter.start()
        with ranks.together():
            if network.adapter.section.adapter_path is not None:
                start_adapter(network, table, network.adapter.section)
    if not had_head:
        context.logger.info(
            f"{section.path} holds no value head: the critic starts with a value of 0"
        )
    return network, table


def _copied(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data.copy_(values)
