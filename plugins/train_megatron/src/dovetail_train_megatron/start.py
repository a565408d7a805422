"""From a context to a Network with its weights: what the engine's `start` puts together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.errors import PluginNeedsError
from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection
from dovetail_torch_engines import Ranks
from dovetail_train_megatron.adapter import MegatronAdapter
from dovetail_train_megatron.architecture import Architecture
from dovetail_train_megatron.checkpoint import start_adapter
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.names import TensorTable
from dovetail_train_megatron.needs import imported, quieten
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.parallel import Parallel
from dovetail_train_megatron.weights import read_weights


def check_device(context: PluginContext) -> None:
    """Check that Megatron can compute on the context's device.

    Raises:
        PluginNeedsError: the device is not a CUDA device.
    """
    if torch.device(context.device).type != "cuda":
        raise PluginNeedsError(
            f"the engine megatron computes on CUDA devices, and role {context.role or 'actor'!r} is on {context.device}",
            hint="use engine fsdp2 on a CPU",
        )


def load_network(
    config: MegatronConfig,
    context: PluginContext,
    section: ModelSection,
    parallel: Parallel,
    ranks: Ranks,
    seed: int,
) -> tuple[Network, TensorTable]:
    """Return this rank's part of the model, loaded, and the table of its tensors. Collective. A model that is not trained gets no adapter.

    The seed is that of torch's generator for the device, and of those that Megatron keeps for tensor and expert parallelism.

    Raises:
        ModelError: the model can't be loaded, or Megatron has no such architecture.
        PluginNeedsError: megatron-core or mbridge is missing.
        ConfigError: the layout does not divide the model, or an adapter does not fit it.
    """
    quieten()
    # Megatron asks its generators in sequence parallelism, where there is no dropout either.
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
