"""A controller in its own process, for tests that kill it: starts probes, prints their process ids, and waits in a call."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from dovetail.dispatch import Mesh
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.sections import Pool
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.runtime import RayRuntime

HERE = Path(__file__).parent


def spec(role: str, kind: str, attribute: str) -> WorkerSpec:
    path = str(HERE / f"probe_{kind}.py")
    ref = PluginRef(kind=kind, name=attribute, path=path, attribute=attribute)
    return WorkerSpec(role=role, plugin=ref, context=PluginContext(role=role))


def main(then: str) -> None:
    runtime = RayRuntime(RayConfig(), PluginContext(logger=logging.getLogger("driver")))
    try:
        runtime.start()
        runtime.place([Pool(name="all", roles=("actor", "rollout"))])
        actor = runtime.worker_group(spec("actor", "engine", "ProbeEngine"), Mesh())
        (replica,) = runtime.rollout_replicas(spec("rollout", "rollout", "ProbeRollout"), 1)
        told = {
            "pids": [actor.where().result()[0]["pid"], replica.facts.pid],  # type: ignore[attr-defined]
            "directory": runtime._cluster.directory,
            "groups": [group.id.hex() for r in runtime._reserved.values() for group in r.groups],
        }
        print(json.dumps(told), flush=True)
        if then == "wait":
            actor.pause_for(600.0).result()
    finally:
        runtime.close()


if __name__ == "__main__":
    main(sys.argv[1])
