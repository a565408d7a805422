"""Accelerators as Ray counts them: a rank and the replica beside it get the same accelerator. No real accelerator is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import ray
import torch

from dovetail.errors import PlacementError
from dovetail.sections import Pool
from dovetail_runtime_ray.capacity import fit, shares
from dovetail_runtime_ray.cluster import Cluster
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.process import Process
from dovetail_runtime_ray.reserve import release, reserve
from dovetail_runtime_ray.wire import ProcessSetup

POOL = Pool(name="all", roles=("actor", "rollout"), ranks_per_node=2, accelerators=True)


@pytest.fixture(scope="module")
def cluster(no_cluster: None) -> Iterator[Cluster]:
    """A local cluster that pretends to have four GPUs."""
    cluster = Cluster(RayConfig(ray_init={"num_gpus": 4}), 8, None)
    yield cluster
    cluster.close()


def setup_of(rank: int) -> ProcessSetup:
    return ProcessSetup(
        label="probe",
        rank=rank,
        accelerator=True,
        working_directory=".",
        run_directory=None,
        environment={},
        threads=1,
        deterministic=False,
    )


class Eyes(Process):
    """A process that reports its visible accelerators."""

    def seen(self) -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_rank_and_its_replica_share_one_accelerator_and_ranks_do_not(cluster: Cluster) -> None:
    wanted = shares([POOL], None)
    reserved = reserve(wanted, fit(wanted, cluster.nodes()))["all"]
    try:
        assert cluster.nodes()[0].free["GPU"] == 2.0
        actor_class: Any = ray.remote(Eyes)
        beside = [
            actor_class.options(**reserved.options(rank, parts=2)).remote(setup_of(rank))
            for rank in (0, 0, 1)
        ]
        ids = [facts.accelerators for facts in ray.get([a.facts.remote() for a in beside])]
        assert ids[0] == ids[1]
        assert ids[1] != ids[2]
        both = attrs.evolve(setup_of(0), visible=(*ids[0], *ids[2]))
        wide = actor_class.options(**reserved.options(0, parts=0)).remote(both)
        assert ray.get(wide.seen.remote()) == f"{ids[0][0]},{ids[2][0]}"
    finally:
        release(reserved.groups)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch sees an accelerator here")
def test_an_accelerator_that_torch_does_not_see_is_said(cluster: Cluster, start: Any) -> None:
    with pytest.raises(
        PlacementError, match=r"Ray gave actor rank [01] an accelerator on .* sees none"
    ):
        start(POOL)


def test_more_ranks_than_accelerators(cluster: Cluster, start: Any) -> None:
    with pytest.raises(PlacementError, match=r"5 accelerators,.*node 5 GPUs.*4 of 4 GPUs"):
        start(attrs.evolve(POOL, ranks_per_node=5))
