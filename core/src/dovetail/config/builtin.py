"""Config classes of the plugins that core ships itself."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection, RuntimeSection


@attrs.frozen(kw_only=True)
class InlineConfig(RuntimeSection):
    """Workers in this process, one a group."""

    device: str = "auto"
    """`auto` takes the accelerator where there is one, else the CPU; or a torch device such as `cpu`."""


@attrs.frozen(kw_only=True)
class NdConfig(PluginSection):
    """How a batch is divided over a mesh; declared by `nd(…)` on a worker's method."""

    mesh: str = "train"
    """Name of the mesh that the group must have."""
    split: tuple[str, ...] = ("dp",)
    """Axes that divide the batch; it is replicated over the others."""
    unit: Literal["sample", "pair", "group"] = "sample"
    """The unit that is never divided: a sample, a pair (of one `pair_id`, or neighbours), or the samples of one `group_id`."""
