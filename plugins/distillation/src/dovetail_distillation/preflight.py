"""A preflight rule: checks that the machines have accelerators for the teachers' servers in addition to the run's pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding
from dovetail.sections import Pool
from dovetail_distillation.config import ScoreTeacherConfig


def teachers_do_not_fit(config: Any, plan: Any) -> Iterator[Finding]:
    """Warn if the servers that the run starts for its teachers need more accelerators than the run's roles leave on this machine.

    A cluster that the run starts has only this machine's accelerators; an existing cluster's accelerators are known only when the run
    starts. The finding is a warning, since the run may start on another machine. Missing accelerators are an error there, before
    training.
    """
    if plan is None or config.runtime.shortage(plan.placement.pools) is not None:
        return  # the pools alone do not fit, which the runtime reports
    servers = [
        Pool(name=f"{name} {k + 1}", roles=(f"teacher {name}",), ranks_per_node=size, accelerators=True)
        for stage in plan.stages
        if isinstance(stage.ref.config, ScoreTeacherConfig)
        for name, section in stage.ref.config.endpoints.items()
        if section.serve is not None and (size := section.serve.accelerators)
        for k in range(section.serve.replicas)
    ]  # fmt: skip
    shortage = config.runtime.shortage([*plan.placement.pools, *servers])
    if shortage is not None:
        wanted = sum(server.ranks for server in servers)
        yield Finding.warning(
            f"the teachers' servers need {wanted} accelerator(s) besides those of the run's pools: {shortage.message}",
            hint="lower serve.replicas or serve.accelerators, give the pools fewer accelerators (runtime.gpus_per_node), use a cluster that "
            "has enough (runtime.address=), or set serve.accelerators=0",
        )
