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
    """Makes PyTorch optimizers for the parameters that an engine trains.

    The engine clips gradients, sets the learning rates and keeps the state in checkpoints. Loading a checkpoint begins
    with a step with gradients and learning rates of 0, which must create the whole state and change no weight.
    """

    @classmethod
    @abstractmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        """Return the bytes of optimizer state for each element of a trained parameter, for the memory estimate.

        Args:
            config: the config of the plugin.
            matrix: whether the element belongs to the weight matrix of a hidden layer.
        """

    @abstractmethod
    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        """Make one optimizer, or several that divide the parameters among them.

        Each parameter group starts with its peak learning rate, which the engine multiplies by the schedule.

        Args:
            parameters: the parameters by name, float32, of any shape. Only optimizers with the capability `sharded` get DTensors,
                which are sharded over ranks.
            matrices: the names of weights [out, in] of hidden linear layers, including factors of adapters; embeddings
                and the output layer are not among them.

        Raises:
            ConfigError: the optimizer does not support such parameters.
        """

    def state_tensors(self, value: Tensor) -> Mapping[str, Tensor]:
        """Return, by name, the tensors that a checkpoint keeps for one tensor of the optimizer state.

        The returned tensors share the memory of `value` and are sharded like the parameter. A tensor subclass that consists of several
        tensors, such as a quantised one, is split into these.

        Args:
            value: this rank's shard of the state tensor, in the shape that the optimizer gave it.
        """
        return {"": value}
