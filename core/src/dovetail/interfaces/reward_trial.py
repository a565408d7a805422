"""The names of `dovetail.scoring.trial`, for plugins that import them from here."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("dovetail.scoring.trial"), name)
