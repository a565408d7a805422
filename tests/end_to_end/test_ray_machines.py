"""A run over two Ray nodes, each with a rank and a replica: weights reach both, and training is that of one node, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_files import assert_same, steps_of, tensors_of

SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
APART = [
    f"runtime.pools.{role}={{roles: [{role}], workers_per_node: 1}}"
    for role in ("actor", "rollout")
]
RUN = ("runtime.name=ray", "runtime.cpus_per_worker=1", "rollout.weight_check.every=1")


@pytest.fixture
def nodes() -> Iterator[str]:
    """The address of a cluster of two nodes, both on this machine."""
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    cluster.add_node(num_cpus=1)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def trained(config: Path, name: str, *overrides: str) -> Path:
    """The directory of a run on Ray."""
    command = [sys.executable, "-m", "dovetail", "train", str(config), *RUN, *overrides]
    done = subprocess.run(
        [*command, f"experiment={name}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=config.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return config.parent / "runs" / "tests" / name


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("over", "within", "transport"),
    [
        pytest.param(
            ["runtime.nodes=2"],
            ["runtime.workers_per_node=2"],
            "shared_memory",
            id="each machine by itself",
        ),
        pytest.param(APART, APART, "nccl", id="from machine to machine"),
    ],
)
def test_weights_reach_replicas_on_two_machines(
    config: Path, nodes: str, over: list[str], within: list[str], transport: str
) -> None:
    two = trained(config, "two", f"runtime.address={nodes}", *over)
    one = trained(config, "one", *within)
    assert json.loads((two / "plan.json").read_text())["publication"]["who"] == transport
    assert len(steps_of(two)) == 3
    for here, there in zip(steps_of(one), steps_of(two), strict=True):
        assert {name: here[name] for name in SAME} == {name: there[name] for name in SAME}
        # Both replicas scored tokens with the version that had just come.
        assert there["weight_check/mean_difference"] < 1e-5
    assert_same(tensors_of(one, 3), tensors_of(two, 3))
