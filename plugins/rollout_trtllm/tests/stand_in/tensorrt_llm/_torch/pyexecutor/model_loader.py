"""How the stand-in takes weights: in pieces, into modules that were made ready, and in force once they are finished."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ModelLoader:
    """Knows the tensors of its model, and takes no notice of others."""

    def attach(self, model: nn.Module) -> None:
        """Of the stand-in: the hooks that modules of the real models have."""
        self._ready = False
        self._staged: dict[str, torch.Tensor] = {}
        self._model = model
        module: Any = model
        module.pre_reload_weights = self._begin
        module.process_weights_after_loading = self._finish

    def reload(self, model: nn.Module, weights: dict, allow_partial_loading: bool = False) -> None:
        """Take a piece."""
        if not self._ready:
            raise RuntimeError("reload before pre_reload_weights")
        if not allow_partial_loading:
            raise ValueError("tensors are missing")
        known = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in weights.items():
            if name not in known:
                continue
            if ".mlp." in name:
                known[name].data.copy_(tensor)
            else:
                self._staged[name] = tensor.clone()

    def _begin(self) -> None:
        self._ready = True
        self._staged.clear()

    @torch.no_grad()
    def _finish(self) -> None:
        """What is no part of an MLP is in force only from here on, as where modules derive from their weights."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if name in self._staged:
                parameter.copy_(self._staged[name])
        self._ready = False
