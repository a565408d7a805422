"""The supported releases of SGLang, and all differences between them.

This module imports SGLang and torch only in functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from logging import Logger
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from dovetail.errors import WeightSyncError
from dovetail_serving import DrivenEngine

if TYPE_CHECKING:
    import torch
    from torch import nn

SGLANG = DrivenEngine(
    title="SGLang",
    package="sglang",
    distributions=("sglang",),
    plugin="dovetail_rollout_sglang",
    oldest=Version("0.5.12"),
    newest=Version("0.5.23"),
    lacks="it can't run the plugin that receives weights in its processes",
)


def require(logger: Logger | None = None) -> None:
    """Check that this environment has a supported SGLang; for errors see `DrivenEngine.require`."""
    SGLANG.require("pip install 'dovetail-rollout-sglang[engine]'", logger)


# -- inside SGLang's processes ----------------------------------------------------------------

_NEWER_NAMES = {"cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Names of server arguments in 0.5.12, and their names in later versions."""
_LATER = frozenset({"retraction_policy"})
"""Arguments that 0.5.12 lacks and does not need."""
_GRPC_PORT = "SGLANG_GRPC_PORT"
_GRPC_AWAY = 10_000
"""Distance from a server's port to its gRPC port in 0.5.12."""
_LAST_PORT = 65_535


def in_this_versions_words(arguments: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a server's arguments under the names of the installed version.

    Args:
        arguments: the arguments, under their oldest names or the names of this version.
        known: the argument names of this version.
    """
    return {
        _NEWER_NAMES[name] if name not in known and _NEWER_NAMES.get(name) in known else name: value
        for name, value in arguments.items()
        if name in known or name not in _LATER
    }


def settle_grpc(
    environment: MutableMapping[str, str], port: int, known: Collection[str], *, guarded: bool
) -> None:
    """Set SGLang's gRPC port so that it neither prevents the server's start nor gives access without a token.

    Versions without an argument for the gRPC port derive it from the server's port. They do not listen on it, but refuse to start if it
    is invalid. Later versions listen on the port in the environment variable SGLANG_GRPC_PORT, and require no token.

    Args:
        environment: the environment variables of this process, before the arguments are parsed.
        port: the port of the server.
        known: the argument names of this version.
        guarded: whether the server requires a token.
    """
    if "grpc_port" in known:
        if guarded:
            environment.pop(_GRPC_PORT, None)
    elif port + _GRPC_AWAY > _LAST_PORT:
        environment.setdefault(_GRPC_PORT, str(port - _GRPC_AWAY))


def updater() -> str:
    """Return the dotted name of the scheduler's method that receives a weight update.

    In SGLang 0.5.12 the method is in a mixin of the scheduler; later versions have it in a separate object.
    """
    found = importlib.util.find_spec("sglang.srt.managers.scheduler_components")
    if found is not None and importlib.util.find_spec(
        "sglang.srt.managers.scheduler_components.weight_updater"
    ):
        return "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor"
    return "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin.update_weights_from_tensor"


def refitted(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that prepares quantised or packed weights for loading, and quantises or packs them again at its end.

    With versions of SGLang that can't unpack weights, it does nothing, which is correct if no weight is packed.

    Raises:
        WeightSyncError: this version can't load over quantised weights; no weight has changed.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    before = getattr(DefaultModelLoader, "restore_weights_before_loading", None)
    after = getattr(DefaultModelLoader, "postprocess_weights", None)
    if (before is None or after is None) and quantised(model):
        raise WeightSyncError(
            "this version of SGLang can't load new weights over quantised ones",
            hint="install a newer one (0.5.23 was tested), or leave rollout.quantization out",
        )

    @contextmanager
    def around() -> Iterator[None]:
        if before is None or after is None:
            yield
            return
        before(model, device)
        try:
            yield
        finally:
            after(model, device)

    return around()


def quantised(model: nn.Module) -> bool:
    """Return whether any layer of an SGLang model stores its weights in a quantised form."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            return True
    return False
