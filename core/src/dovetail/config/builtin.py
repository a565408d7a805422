"""Config classes of the plugins that core ships itself."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection, RuntimeSection


@attrs.frozen(kw_only=True)
class InlineConfig(RuntimeSection):
    """Config of the inline runtime: workers in this process, one for each worker group."""

    device: str = "auto"
    """A torch device such as `cpu`; `auto` takes the accelerator if there is one, else the CPU."""


@attrs.frozen(kw_only=True)
class NdConfig(PluginSection):
    """Config of the dispatch mode `nd`, which divides a batch over a mesh. A worker's method declares this mode with `nd(…)`."""

    mesh: str = "train"
    """Name of the mesh that the worker group must have."""
    split: tuple[str, ...] = ("dp",)
    """Mesh axes that divide the batch; the batch is replicated over the other axes."""
    unit: Literal["sample", "pair", "group"] = "sample"
    """What is never divided: a sample, a pair (the samples of one `pair_id`; two adjacent samples without this column), or
    the samples of one `group_id`."""
