"""Config classes of the dataset source and the samplers."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class FilesConfig(PluginSection):
    """Parquet, JSONL, JSON arrays and Arrow files, also compressed by gzip or zstd."""

    format: Literal["auto", "parquet", "jsonl"] = "auto"
    """What the files are; auto goes by their names, then by their first bytes. A JSON array is recognised under `jsonl`."""


@attrs.frozen(kw_only=True)
class ShuffledConfig(PluginSection):
    """Each epoch in an order of its own."""

    seed: int | None = None
    """Seed of the order; the run's where absent."""
