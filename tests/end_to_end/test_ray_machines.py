"""A run over two Ray nodes, each with a rank and a replica: weights reach both, and training is that of one node, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import assert_same, steps_of, tensors_of

SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
POOLS = [f"runtime.pools.{role}.roles={role}" for role in ("actor", "rollout")]
SOCKETS = "runtime.env_vars={NCCL_P2P_DISABLE: '1', NCCL_SHM_DISABLE: '1'}"
"""Accelerators of one machine then talk as those of two do."""
RUN = ("runtime.name=ray", "runtime.cpus_per_worker=1", "rollout.weight_check.every=1")


@contextmanager
def two_nodes(gpus: int = 0, cpus: int = 1) -> Iterator[str]:
    """The address of a cluster of two nodes, both on this machine, each with accelerators and cores of its own."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number in range(2):
            with pytest.MonkeyPatch.context() as patch:
                if gpus:  # a node gives its processes those that it sees when it starts
                    patch.setenv("CUDA_VISIBLE_DEVICES", str(number))
                cluster.add_node(num_cpus=cpus, num_gpus=gpus, include_dashboard=False)
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
        pytest.param(POOLS, POOLS, "nccl", id="from machine to machine"),
    ],
)
def test_weights_reach_replicas_on_two_machines(
    config: Path, over: list[str], within: list[str], transport: str
) -> None:
    with two_nodes() as address:
        two = trained(config, "two", f"runtime.address={address}", *over)
    one = trained(config, "one", *within)
    assert json.loads((two / "plan.json").read_text())["publication"]["who"] == transport
    assert len(steps_of(two)) == 3
    for here, there in zip(steps_of(one), steps_of(two), strict=True):
        assert {name: here[name] for name in SAME} == {name: there[name] for name in SAME}
        # Both replicas scored tokens with the version that had just come.
        assert there["weight_check/mean_difference"] < 1e-5
    assert_same(tensors_of(one, 3), tensors_of(two, 3))


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_hybrid_sharding_over_two_machines_is_that_of_one_and_resumes_on_one_machine(
    config: Path,
) -> None:
    """Shards of a parameter stay within a machine, and the machines are copies of each other."""
    hybrid = "actor.engine={name: fsdp2, shard_size: 2}"
    with two_nodes(cpus=2) as address:
        over = ("runtime.nodes=2", "runtime.workers_per_node=2", f"runtime.address={address}")
        two = trained(config, "two", hybrid, *over)
    one = trained(config, "one", hybrid, "runtime.workers_per_node=4")
    assert json.loads((two / "plan.json").read_text())["publication"]["who"] == "shared_memory"
    for here, there in zip(steps_of(one), steps_of(two), strict=True):
        assert {name: here[name] for name in SAME} == {name: there[name] for name in SAME}
        assert there["weight_check/mean_difference"] < 1e-5
    assert_same(tensors_of(one, 3), tensors_of(two, 3))
    # One machine, half of the ranks, and every parameter sharded over all of them.
    trained(config, "two", "runtime.workers_per_node=2", "trainer.total_steps=4")
    trained(config, "one", hybrid, "runtime.workers_per_node=4", "trainer.total_steps=4")
    expected, found = steps_of(one), steps_of(two)
    assert [step["step"] for step in found] == [1, 2, 3, 4]
    assert found[3]["reward/mean"] == expected[3]["reward/mean"]
    assert found[3]["actor/grad_norm"] == pytest.approx(expected[3]["actor/grad_norm"], rel=1e-4)
    weights = tensors_of(one, 4)
    for name, value in tensors_of(two, 4).items():
        np.testing.assert_allclose(value, weights[name], atol=1e-5, err_msg=name)


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("over", "transport"), [(["runtime.nodes=2"], "cuda_ipc"), (POOLS, "nccl")]
)
def test_weights_reach_replicas_on_accelerators_of_two_machines(
    config: Path, over: list[str], transport: str
) -> None:
    with two_nodes(gpus=1) as address:
        gpus = [f"runtime.address={address}", "runtime.gpus_per_node=1", SOCKETS]
        run = trained(config, "gpus", *gpus, *over)
    assert json.loads((run / "plan.json").read_text())["publication"]["who"] == transport
    steps = steps_of(run)
    assert len(steps) == 3
    assert all(step["weight_check/mean_difference"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
