"""The data of a step: named columns of N samples, ragged ones packed. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.batch.columns import GLOSSARY, Column, check_batch, glossary
    from dovetail.batch.partition import balanced_partition, budget_partition, token_counts
    from dovetail.batch.ragged import Ragged
    from dovetail.batch.remote import Store, Stored
    from dovetail.batch.rows import RaggedRows

_HOME = {
    "Batch": "batch",
    "Column": "columns",
    "GLOSSARY": "columns",
    "Ragged": "ragged",
    "RaggedRows": "rows",
    "Store": "remote",
    "Stored": "remote",
    "balanced_partition": "partition",
    "budget_partition": "partition",
    "check_batch": "columns",
    "glossary": "columns",
    "token_counts": "partition",
}

__all__ = [
    "GLOSSARY",
    "Batch",
    "Column",
    "Ragged",
    "RaggedRows",
    "Store",
    "Stored",
    "balanced_partition",
    "budget_partition",
    "check_batch",
    "glossary",
    "token_counts",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
