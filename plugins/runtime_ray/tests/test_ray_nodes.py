"""A pool over two nodes of an existing cluster: ranks on different nodes, one process group over TCP, an environment on both nodes."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest


@pytest.mark.nightly
def test_ranks_of_one_pool_on_two_nodes_sum_together(no_cluster: None, probes: Any) -> None:
    from ray.cluster_utils import Cluster

    from dovetail.interfaces import PluginContext
    from dovetail_runtime_ray.config import RayConfig
    from dovetail_runtime_ray.runtime import RayRuntime

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2)
    runtime = RayRuntime(
        RayConfig(address=cluster.address, environments={"rollout": sys.executable}),
        PluginContext(),
    )
    try:
        runtime.start()
        runtime.place([attrs.evolve(probes.pool("actor", "rollout"), nodes=2)])
        assert len({node.node_id for node in runtime._reserved["actor+rollout"].nodes}) == 2
        actor = probes.group(runtime)
        assert [where["world"] for where in actor.where().result()] == [2, 2]
        assert actor.summed(1.0).result() == [3.0, 3.0]
        assert len(runtime.rollout_replicas(probes.rollout(), 2)) == 2
    finally:
        runtime.close()
        cluster.shutdown()
