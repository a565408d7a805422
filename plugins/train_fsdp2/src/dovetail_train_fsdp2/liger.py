"""Liger's kernels in one model (arXiv 2410.10989): norms, rotary positions and gated layers, but not Liger's output layer."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dovetail.errors import ConfigError, PluginNeedsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTARY = "apply_rotary_pos_emb"
"""The name of the function for rotary positions in transformers' module of any architecture."""
WANTED = frozenset({"rope", "rms_norm", "layer_norm", "swiglu", "geglu"})
"""The switches of Liger that are turned on; Liger's other switches belong to losses, which Dovetail computes itself."""

_logger = logging.getLogger(__name__)


def apply_liger(trunk: PreTrainedModel, device: str) -> None:
    """Replace parts of the model by Liger's kernels. `device` is the type of the device that runs the model.

    Liger also replaces functions in the architecture's module, for every model of the process. They are restored, except the function for
    rotary positions, which can't be replaced for one model alone: every model uses Liger's for CUDA tensors, and the original for others.

    Raises:
        PluginNeedsError: liger-kernel is not installed.
        ConfigError: Liger does not support the architecture or the device.
    """
    if device != "cuda":
        raise ConfigError(
            f"liger=true needs a CUDA device; the model is on {device!r}",
            hint="leave `liger` out of the engine's section, or replace it by compile=true",
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise PluginNeedsError(
            f"liger=true needs the package liger-kernel, which can't be imported here: {error}",
            hint="pip install 'dovetail-train-fsdp2[liger]', or replace liger=true by compile=true",
        ) from error
    kind = trunk.config.model_type
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise ConfigError(
            f"liger=true can't be used: Liger has no kernels for the architecture {kind!r}",
            hint="leave `liger` out of the engine's section, or replace it by compile=true",
        )
    module = sys.modules[type(trunk).__module__]
    before = dict(vars(module))
    switches = set(inspect.signature(apply).parameters) - {"model"}
    apply(model=trunk, **{name: name in WANTED for name in switches})
    rotary = vars(module).get(ROTARY)
    for name, value in before.items():
        setattr(module, name, value)
    if rotary is not None and rotary is not before.get(ROTARY):
        setattr(module, ROTARY, _on_cuda(rotary, before[ROTARY]))


def _on_cuda(fast: Any, plain: Any) -> Any:
    """Return a function that calls `fast` for queries on CUDA, and `plain` for others."""

    def rotated(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (fast if query.is_cuda else plain)(query, *args, **kwargs)

    return rotated
