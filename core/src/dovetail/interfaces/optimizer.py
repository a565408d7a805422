"""Optimizer: how a gradient becomes a step of the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from dovetail.interfaces.plugin import Plugin, PluginConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Optimizer(Plugin):
    """Makes optimizers of PyTorch over the parameters that an engine trains.

    The engine clips gradients, sets the learning rates and keeps the state in checkpoints. For the latter a step with gradients and
    learning rates of 0 must make the whole state and change no weight.
    """

    @classmethod
    @abstractmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        """Return the bytes of state for each trained parameter element, for the memory estimate.

        Args:
            config: the config of the plugin.
            matrix: whether the element belongs to the weight matrix of a hidden layer.
        """

    @abstractmethod
    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        """Make one optimizer, or several that share the parameters out. Each of their groups starts with its peak learning rate,
        which the engine multiplies by the schedule.

        Args:
            parameters: by name, float32, of any shape; DTensors where they are divided over ranks, which only optimizers with
                the capability `sharded` are given.
            matrices: the names of weights [out, in] of hidden linear layers, including factors of adapters; embeddings
                and the output layer are not among them.

        Raises:
            ConfigError: the optimizer does not support such parameters.
        """

    def state_tensors(self, value: Tensor) -> Mapping[str, Tensor]:
        """Return what a checkpoint keeps of one tensor of the state: names, and tensors that share its memory, divided over ranks as the
        parameter is. One that is made of several, as quantised ones are, is taken apart here.

        Args:
            value: this rank's part of it, of the shape that the optimizer gave it.
        """
        return {"": value}
