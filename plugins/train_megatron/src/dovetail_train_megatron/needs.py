"""Importing Megatron-Core and mbridge on first use, without their warnings; an error names the command that installs them."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dovetail.errors import PluginNeedsError


def imported(module: str) -> Any:
    """Import a module of megatron-core or mbridge.

    Raises:
        PluginNeedsError: the module can't be imported.
    """
    try:
        with warnings.catch_warnings():
            # Megatron-Core warns of missing faster libraries at every import.
            warnings.simplefilter("ignore")
            return import_module(module)
    except ImportError as error:
        raise PluginNeedsError(
            f"the engine megatron needs megatron-core and mbridge, but {module} can't be imported here: {error}",
            hint="pip install 'dovetail-train-megatron[engine]'",
        ) from error


_ITS_OWN = ("full scope is deprecated", "TypedStorage is deprecated")
"""Beginnings of Megatron-Core's warnings about its own code, which every rank would print."""


def quieten() -> None:
    """Suppress, in this process, Megatron-Core's deprecation warnings about its own code; warnings that concern users are still shown."""
    for beginning in _ITS_OWN:
        warnings.filterwarnings("ignore", message=beginning, module=r"megatron\.core")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return find_spec("transformer_engine") is not None
