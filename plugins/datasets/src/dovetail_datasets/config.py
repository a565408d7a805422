"""Config classes of the dataset source and the samplers."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class FilesConfig(PluginSection):
    """Settings of the dataset source `files`: Parquet, JSONL, JSON arrays and Arrow files, also compressed by gzip or zstd."""

    format: Literal["auto", "parquet", "jsonl"] = "auto"
    """Format of the files; `auto` recognises it by a file's name, then by its first bytes. `jsonl` includes JSON arrays."""


@attrs.frozen(kw_only=True)
class ShuffledConfig(PluginSection):
    """Settings of the sampler `shuffled`, which draws a new order for each epoch."""

    seed: int | None = None
    """Seed of the order; None takes the run's seed."""
