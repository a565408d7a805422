"""The `profile` section: roles and ranks to profile, the steps, and the tool."""

from __future__ import annotations

import attrs

from dovetail.sections.fields import ONE_OR_MANY


@attrs.frozen(kw_only=True)
class ProfileSection:
    """Profiling of training workers over some steps; files go to `profiles/` in the run directory."""

    tool: str | None = None
    """`torch`: a Chrome trace of operators and kernels, for Perfetto (`<role>-rank<r>-steps<a>-<b>.json.gz`). `memory`: the accelerator's
    allocations, for pytorch.org/memory_viz (`….pickle`). `nsys`: marks the steps and every call of a worker (NVTX) for Nsight Systems,
    under which the run is started: `nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop dovetail train
    …`. Packages add tools by entry points of the group `dovetail.profiler`."""
    roles: tuple[str, ...] = attrs.field(default=("actor",), metadata={ONE_OR_MANY: True})
    """Roles whose workers are profiled: `actor`, `critic`, `ref`, or a name of `roles`. Roles in the same process share one file, named
    after the first role."""
    steps: tuple[int, int] = (2, 2)
    """First and last profiled step. The first step of a run includes warm-up, so that its times are not typical."""
    ranks: tuple[int, ...] = (0,)
    """Profiled ranks of each role."""
