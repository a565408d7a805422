"""Sharding a model over the ranks of its engine with fully_shard (FSDP2, arXiv 2304.11277).

fully_shard wraps every decoder layer, and the model's `ModelRunner` (the runner) as the root. Weights outside of decoder layers (embedding,
last norm, output layer) are gathered during the runner's forward pass. Weights, gradients and moments are sharded in float32; layers
compute in the compute dtype. Gradients are sums over all ranks, not means, since each rank's loss is already divided by the denominator of
the whole mini-batch.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from dovetail.errors import ModelError
from dovetail_torch_engines import Ranks
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.value_model import ValueModel
from dovetail_train_fsdp2.vision import language_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.forward import ModelRunner


class Sharding:
    """Shards one model with fully_shard, and controls when gradients are reduced and gathered weights freed.

    Attributes:
        replicas: the number of groups of ranks that each hold all shards.
        state_device: the device of shards, gradients and moments while the model computes.
    """

    def __init__(self, config: Fsdp2Config, ranks: Ranks, device: torch.device) -> None:
        """Create the device mesh; collective.

        Raises:
            PlanError: `shard_size` does not divide the number of ranks.
        """
        self._config = config
        self._device = device
        shards = config.shards(ranks.size)
        self.replicas = ranks.size // shards
        self.state_device = torch.device("cpu") if config.cpu_offload else device
        self._reshards = config.reshard_after_forward
        if self._reshards is None:
            # Between CPU processes, communication costs more than memory.
            self._reshards = shards > 1 and device.type != "cpu"
        self._mesh = _device_mesh(device, self.replicas, shards)
        self._runner: ModelRunner | None = None

    def apply(self, runner: ModelRunner) -> None:
        """Shard the model of a runner in place. Its weights may be on the meta device.

        Raises:
            ModelError: no decoder layer is found in the model.
        """
        for block in blocks_of(runner.trunk):
            self._shard(block, runner.dtype)
        if isinstance(runner.model, ValueModel):
            # Values are computed in float32, whatever the compute dtype of the layers.
            self._shard(runner.model.value_head, torch.float32)
        self._shard(runner, runner.dtype)
        runner.sharded = True
        self._runner = runner

    def materialise(self) -> None:
        """Allocate uninitialised memory for weights on the meta device; buffers keep their content."""
        runner = self._sharded()
        buffers = {name: buffer.clone() for name, buffer in runner.named_buffers()}
        runner.to_empty(device=self.state_device)
        for name, buffer in runner.named_buffers():
            buffer.data = buffers[name].to(self._device)

    def before_backward(self, *, last: bool) -> None:
        """Set up communication for the backward pass of the next micro-batch; `last` marks the last micro-batch of an update."""
        root = cast("FSDPModule", self._sharded())
        reduces = last or self._config.reduce_gradients != "once"
        root.set_requires_gradient_sync(reduces)
        # It then waits for the last reduction and frees its input, the whole gradient of the embeddings and the output layer.
        root.set_is_last_backward(reduces)
        if not self._reshards:
            # Weights do not change before the optimizer's step, so that gathered weights stay until the last backward pass.
            root.set_reshard_after_backward(last)

    def free(self) -> None:
        """Free the gathered weights that remain after a forward pass without a backward pass."""
        for module in self._sharded().modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def recover(self) -> None:
        """Reset fully_shard's state after an error in a pass, and drop the pass's gradients. Not collective."""
        root = self._sharded()
        if (reset := getattr(root, "reset_iter_state", None)) is not None:  # since torch 2.13
            cast("Callable[[], None]", reset)()
        self.free()
        for module in root.modules():
            if isinstance(module, FSDPModule):
                _drop_gathered_gradients(module)

    def _sharded(self) -> ModelRunner:
        assert self._runner is not None
        return self._runner

    def _shard(self, module: nn.Module, dtype: torch.dtype) -> None:
        pinned = self._device.type != "cpu"
        offload = (
            CPUOffloadPolicy(pin_memory=pinned) if self._config.cpu_offload else OffloadPolicy()
        )
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=None if self._reshards else False,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            ),
            offload_policy=offload,
        )
        unit = cast("FSDPModule", module)
        unit.set_gradient_divide_factor(1.0)
        # gloo reduces by sums only.
        unit.set_force_sum_reduction_for_comms(True)


def _drop_gathered_gradients(module: FSDPModule) -> None:
    """Drop gradients of gathered parameters that were not reduced; torch has no public function for this."""
    state: Any = module._get_fsdp_state()  # noqa: SLF001 - see above
    single = getattr(state, "_fsdp_param_group", None)  # until torch 2.12
    groups = getattr(state, "_fsdp_param_groups", [single] if single is not None else [])
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                gathered.grad = None


def blocks_of(trunk: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model, outermost modules only.

    Decoder layers are the modules of the classes in the model's `_no_split_modules`. If there are none, they are the longest list
    of modules of one class.

    Raises:
        ModelError: the model has no decoder layers.
    """
    names = set(trunk._no_split_modules or ())  # noqa: SLF001 - the field's only name for them
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    # A vision tower is sharded with the root: its blocks run only for images, which not every rank may have.
    language = language_of(trunk)
    for module in language.modules():
        if type(module).__name__ in names and id(module) not in inside:
            blocks.append(module)
            inside.update(map(id, module.modules()))
    if blocks:
        return blocks
    lists = [
        list(module)
        for module in language.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    if not lists:
        looked_for = (
            f"modules of class {', '.join(sorted(names))}" if names else "_no_split_modules"
        )
        raise ModelError(
            f"{type(trunk).__name__} can't be sharded: it has no known decoder layers (neither {looked_for} nor "
            "a ModuleList whose members are of one class)",
            hint="train the model in one process on the CPU, or set _no_split_modules in its class",
        )
    return max(lists, key=len)


def join_alone(device: torch.device) -> None:
    """Create torch's default process group with this process as its only rank, unless a group exists.

    fully_shard needs a group. No port is opened and no other process is contacted.
    """
    if dist.is_initialized():
        return
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_mesh(device: torch.device, replicas: int, shards: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    if replicas == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
