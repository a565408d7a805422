"""Moving one rank's parameters, gradients and optimizer states off the accelerator and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail_train_megatron.network import Network
from dovetail_train_megatron.optim import MegatronOptimizer


class TensorOffloader:
    """Moves a rank's tensors to host memory and back. Modules and optimizer keep their references to the same storages, which are
    empty meanwhile.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._away: list[tuple[Tensor, Tensor]] = []
        self.offloaded = False

    def offload(self, optimizer: MegatronOptimizer | None) -> None:
        """Move parameters, gradients and optimizer states to host memory, and free the accelerator's memory."""
        if self.offloaded or self._network.device.type == "cpu":
            return
        if optimizer is None:
            self._network.module.to("cpu")
        else:
            # The cache is emptied once, below, after everything is freed.
            optimizer.module.offload_grad_buffers(synchronize=True, empty_cache=False)
            for buffer in _buffers(optimizer):
                self._empty(buffer.param_data)
            for parameter in self._network.module.parameters():
                if not parameter.requires_grad:
                    self._empty(parameter.data)
            for inner, main in optimizer.states():
                # Weights of float32 modules are views of a buffer, which is already empty.
                if main.untyped_storage().size():
                    self._empty(main.data)
                for value in inner.state.get(main, {}).values():
                    if isinstance(value, Tensor) and value.is_cuda:
                        self._empty(value)
        self.offloaded = True
        # torch's allocator caches freed memory; the rollout's process gets the memory only after the cache is emptied.
        torch.accelerator.empty_cache()

    def onload(self, optimizer: MegatronOptimizer | None) -> None:
        """Move parameters, gradients and optimizer states back to the accelerator."""
        if not self.offloaded:
            return
        if optimizer is None:
            self._network.module.to(self._network.device)
        else:
            for tensor, kept in self._away:
                tensor.untyped_storage().resize_(kept.numel() * kept.element_size())
                tensor.copy_(kept, non_blocking=True)
            # Wait, since the pinned copies are dropped below, and other streams may use the tensors from here on.
            torch.accelerator.synchronize()
            optimizer.module.restore_grad_buffers(synchronize=True)
        self._away = []
        self.offloaded = False

    def _empty(self, tensor: Tensor) -> None:
        """Copy a tensor to pinned memory, and free its storage, which no other tensor may use."""
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        kept.copy_(tensor)
        self._away.append((tensor, kept))
        tensor.untyped_storage().resize_(0)


def _buffers(optimizer: MegatronOptimizer) -> list[Any]:
    module = optimizer.module
    return [*module.buffers, *module.expert_parallel_buffers]
