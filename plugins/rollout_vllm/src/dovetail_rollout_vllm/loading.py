"""Loading weights into a model inside vLLM: directly if parameters are stored as in checkpoints, else layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dovetail_serving import refuse_missing_weights, without_adapters

Named = tuple[str, Tensor]


class Counted(Iterator[Named]):
    """Iterates over the tensors of an update, counts them, and copies each tensor that stays valid only until the next is requested.

    The copy, on the model's device, is needed because vLLM may use a tensor later, when other tensors of its layer have arrived.

    Args:
        tensors: the verified tensors with their names.
        lasting: whether each tensor stays valid after the next is requested.
        device: the model's device.

    Attributes:
        taken: the number of tensors returned so far.
    """

    def __init__(
        self, tensors: Iterable[Named], *, lasting: bool, device: torch.device | str
    ) -> None:
        self._tensors = iter(tensors)
        self._lasting, self._device = lasting, device
        self.taken = 0

    def __next__(self) -> Named:
        name, tensor = next(self._tensors)
        self.taken += 1
        return name, tensor if self._lasting else tensor.to(self._device, copy=True)


@torch.no_grad()
def load(model: nn.Module, model_config: object, tensors: Counted) -> None:
    """Load a complete set of weights into a vLLM model.

    After a failure the model may hold a mixture of old and new weights; it can be loaded again.

    Args:
        model: the vLLM model.
        model_config: vLLM's config of the model.
        tensors: the tensors by their Hugging Face names.

    Raises:
        WeightSyncError: tensors of the model were missing.
    """
    with without_adapters(model):
        if stored_as_they_come(model):
            expected = _names_of(model)
            loaded = model.load_weights(tensors)  # type: ignore[operator]
            _refuse_missing(expected, loaded)
            return
        _load_by_layers(model, model_config, tensors)


def stored_as_they_come(model: nn.Module) -> bool:
    """Return whether all parameters are stored as in checkpoints: not quantised, not prepacked, and without derived tensors."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return False
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in plain:
            return False
        if not hasattr(module, "process_weights_after_loading"):
            continue
        if type(module) is not Attention or any(True for _ in module.parameters()):
            return False
    return True


def _load_by_layers(model: nn.Module, model_config: object, tensors: Counted) -> None:
    """Let vLLM process (quantise, prepack, shard) each layer after all of its tensors have arrived.

    vLLM copies the result into the old tensors, from which CUDA graphs read.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    expected = _names_of(model)
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(tensors)  # type: ignore[operator]
        _refuse_missing(expected, loaded)
    except BaseException:
        _forget_what_waits(model)
        raise
    finally:
        finalize_layerwise_reload(model, model_config)
    _pack_tied_layers(model)


def _pack_tied_layers(model: nn.Module) -> None:
    """Pack output layers that share the embedding's weight again.

    On a CPU vLLM packs a copy of the weight for each layer, and does not update the copy if nothing is loaded under the
    layer's own name.
    """
    module: Any
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _forget_what_waits(model: nn.Module) -> None:
    """Make layers that did not receive all of their tensors keep their old weights."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _names_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that must be loaded, as models report them.

    Scales are left out, because vLLM computes them when it quantises.
    """
    return {name for name, _ in model.named_parameters() if "scale" not in name.rpartition(".")[2]}


def _refuse_missing(expected: set[str], loaded: object) -> None:
    """Raise an error if `loaded`, the result of a model's `load_weights`, lacks an expected name; some models return no names."""
    if isinstance(loaded, set):
        refuse_missing_weights(sorted(expected - loaded))
