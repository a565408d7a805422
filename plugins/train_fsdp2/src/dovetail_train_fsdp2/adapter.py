"""Adapter: LoRA on a model through peft (arXiv 2106.09685). The base stays frozen, and is the reference policy.

A layer's weight becomes W + s · B A, with A [rank, in] drawn at random, B [out, rank] from 0, and s = alpha / rank
(alpha / √rank where rank-stabilised, arXiv 2312.03732). A and B are float32; they are all that is trained.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError, ModelError, PluginNeedsError
from dovetail_train_fsdp2.config import ALL_LINEAR, LoraSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"
"""peft's name of the one adapter that a model has here."""
BASE = "base_layer."
"""Where peft keeps the layer that it wraps."""


class Adapter:
    """The low-rank layers that were put into one model."""

    def __init__(self, model: PreTrainedModel, section: LoraSection, *, seed: int) -> None:
        """Wrap the layers that the section names, in place, and freeze everything else.

        Args:
            model: float32; its other weights are the same afterwards.
            section: rank, scale and layers.
            seed: of A; torch's own random state is left as it was.

        Raises:
            PluginNeedsError: peft is not installed.
            ConfigError: the model has no such layers, or one of them can't be adapted.
        """
        self._layers = _inject(model, section, seed)
        _check_layers(model, self._layers)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model as it was. Not for use with gradients."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def base_name(self, name: str) -> str | None:
        """The name that a tensor of the model has without the adapter; None for the adapter's own."""
        for prefix in self._layers:
            if name.startswith(f"{prefix}."):
                inner = name.removeprefix(f"{prefix}.")
                return f"{prefix}.{inner.removeprefix(BASE)}" if inner.startswith(BASE) else None
        return name

    def merged(self, tensor: Tensor) -> Tensor:
        """A weight of the base with its layer's update added, float32; any other tensor as it is.

        Nothing is changed in place: the update is added to a copy.
        """
        layer = self._by_place().get(_place(tensor))
        if layer is None:
            return tensor
        with torch.no_grad():
            update: Tensor = layer.get_delta_weight(NAME).float()
            return tensor.float() + update

    def check_merges(self, weights: dict[str, Tensor]) -> None:
        """See that every adapted weight is among these, unchanged in form, so that it can be merged.

        Raises:
            ModelError: the checkpoint's form fuses or splits one of them.
        """
        places = {_place(tensor) for tensor in weights.values()}
        for prefix, layer in self._layers.items():
            if _place(layer.get_base_layer().weight) not in places:
                raise ModelError(
                    f"the weight of {prefix!r} has another form in this architecture's checkpoints, "
                    "so that its update can't be merged into it",
                    hint="leave that layer out of lora.target_modules",
                )

    def _by_place(self) -> dict[tuple[Any, ...], Any]:
        layers = self._layers.values()
        return {_place(layer.get_base_layer().weight): layer for layer in layers}


def narrow_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep frozen linear layers in the dtype that autocast would give them at every pass, where nothing is lost.

    Args:
        model: with an adapter; afterwards it computes under autocast only. Its output layer is left alone.
        dtype: the compute dtype.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module is head or module.weight is embedding:
            continue
        own = list(module.parameters(recurse=False))
        if not any(p.requires_grad or not torch.equal(p.to(dtype).float(), p) for p in own):
            module.to(dtype)


def _inject(model: PreTrainedModel, section: LoraSection, seed: int) -> dict[str, Any]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise PluginNeedsError(
            f"lora needs the package peft, which can't be imported here: {error}",
            hint="pip install 'dovetail-train-fsdp2[lora]'",
        ) from error
    from transformers.pytorch_utils import Conv1D

    targets = section.target_modules
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        use_rslora=section.rank_stabilised,
        lora_dropout=0.0,
        bias="none",
    )
    known = (nn.Linear, Conv1D)
    linear = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, known)}
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        # What it would warn of is found out here, or checked below.
        warnings.filterwarnings("ignore", module="peft")
        try:
            inject_adapter_in_model(config, model, NAME)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules {', '.join(targets)} does not fit the model: {str(error).partition(chr(10))[0]}",
                hint=f"choose {ALL_LINEAR}, or of: {', '.join(linear)}",
            ) from error
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def _check_layers(model: PreTrainedModel, layers: dict[str, Any]) -> None:
    """See that every update can be merged: into a weight of its layer's own, which no other layer shares."""
    names = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    for name, layer in layers.items():
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None:
            raise ConfigError(
                f"lora.target_modules reaches {name!r}, whose weights are fused over experts",
                hint="name the layers to adapt one by one, such as [q_proj, k_proj, v_proj, o_proj]",
            )
        if names[id(weight)] > 1:
            raise ConfigError(
                f"lora.target_modules names {name!r}, whose weight is another layer's too",
                hint="leave it out: the two would part when the update is merged",
            )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from every other, whichever view of it is at hand."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.device)
