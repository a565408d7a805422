"""Building an optimizer from a model's `optim` section. Some, such as Muon, treat the matrices of hidden layers differently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dovetail.interfaces import Optimizer, PluginContext
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import OptimSection


def build_optimizer(section: OptimSection) -> Optimizer:
    """Construct the optimizer plugin that an `optim` section selects.

    Raises:
        PluginError: the plugin can't be found or loaded, or a package that the plugin needs is missing.
    """
    return cast("Optimizer", make_plugin(ref_for("optimizer", section), PluginContext()))


def hidden_matrices(model: nn.Module, head: nn.Module | None) -> frozenset[str]:
    """Return the names of hidden linear layers' weights [out, in], without the output layer and weights shared with an embedding.

    Args:
        model: the model, sharded or not.
        head: the output layer; None if the model has none.
    """
    modules = list(model.modules())
    linear = {id(m.weight) for m in modules if isinstance(m, nn.Linear) and m is not head}
    other = {id(m.weight) for m in modules if isinstance(m, nn.Embedding) or m is head}
    return frozenset(
        name for name, p in model.named_parameters() if id(p) in linear and id(p) not in other
    )


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """Return the learning rate of every parameter group; this is the peak rate until `set_learning_rates` is called."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], rates: Iterable[float]) -> None:
    """Set the learning rate of every parameter group, in the order of `learning_rates`; rates that are tensors change in place."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
