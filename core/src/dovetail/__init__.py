"""Dovetail: reinforcement-learning post-training of language models, where everything plugs in.

Attributes load on first use (PEP 562), so that `import dovetail` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail import batch, config, dispatch, errors, hooks, interfaces, numerics, telemetry

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "batch",
    "config",
    "dispatch",
    "errors",
    "hooks",
    "interfaces",
    "numerics",
    "telemetry",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return importlib.import_module(f"dovetail.{name}")
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
