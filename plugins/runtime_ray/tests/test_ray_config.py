"""The runtime's config: the pools that follow from it, and errors before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from dovetail.config import load_config
from dovetail.errors import ConfigError, PlanError
from dovetail.sections import Pool
from dovetail_runtime_ray.config import PoolSection, RayConfig

ROLES = ("actor", "ref", "rollout")
GENERATE = PoolSection(roles=("rollout",), gpus_per_node=2)


def by_name(config: RayConfig, roles: tuple[str, ...] = ROLES) -> dict[str, Pool]:
    return {pool.name: pool for pool in config.pools_for(roles)}


def test_without_pools_every_role_shares_one() -> None:
    assert by_name(RayConfig(nodes=2, gpus_per_node=8)) == {
        "all": Pool(name="all", roles=ROLES, nodes=2, ranks_per_node=8, accelerators=True)
    }
    assert by_name(RayConfig(workers_per_node=3))["all"] == Pool(
        name="all", roles=ROLES, ranks_per_node=3
    )
    assert by_name(RayConfig())["all"].ranks == 1


def test_roles_that_no_pool_names_share_a_further_one() -> None:
    pools = by_name(
        RayConfig(
            gpus_per_node=6, pools={"generate": PoolSection(roles=("rollout",), gpus_per_node=2)}
        )
    )
    assert pools["generate"] == Pool(
        name="generate", roles=("rollout",), ranks_per_node=2, accelerators=True
    )
    assert pools["others"].roles == ("actor", "ref")
    assert pools["others"].ranks == 6


def test_what_a_pool_leaves_out_is_as_the_runtime_says() -> None:
    section = PoolSection(roles=ROLES)
    assert by_name(RayConfig(nodes=2, gpus_per_node=4, pools={"a": section}))["a"].ranks == 8
    cpus = PoolSection(roles=("ref",), workers_per_node=2)
    mixed = by_name(RayConfig(gpus_per_node=4, pools={"slow": cpus}))
    assert (mixed["slow"].accelerators, mixed["slow"].ranks) == (False, 2)
    assert mixed["others"].accelerators


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"pools": {"a": PoolSection(roles=("actr",))}},
            "'actr', which.*'actor'",
        ),
        ({"pools": {"a": PoolSection(roles=("critic",))}}, "'critic', which"),
        ({"pools": {"a": PoolSection()}}, "names no role"),
        (
            {"pools": {"a": PoolSection(roles=("ref",)), "b": PoolSection(roles=("ref",))}},
            "'ref' .*'a' and 'b'",
        ),
        ({"pools": {"a": PoolSection(roles=("ref", "ref"))}}, "a role twice"),
        ({"pools": {"others": PoolSection(roles=("ref",))}}, "here actor, rollout"),
        ({"gpus_per_node": 4, "workers_per_node": 2}, "gpus_per_node=4 and workers_per_node=2"),
        ({"gpus_per_node": 4, "device": "cpu"}, "runtime.device='cpu' forbids"),
    ],
)
def test_pools_that_make_no_sense(config: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){said}"):
        RayConfig(**config).pools_for(ROLES)


@pytest.mark.parametrize(
    ("config", "transport", "joined"),
    [
        ({}, "shared_memory", "shared_memory"),
        ({"nodes": 2}, "shared_memory", "disk"),
        ({"pools": {"a": PoolSection(roles=("rollout",))}, "address": "auto"}, "nccl", "disk"),
        ({"pools": {"a": GENERATE}, "address": "auto"}, "disk", "disk"),
        ({"pools": {"a": PoolSection(roles=("ref",))}}, "shared_memory", "shared_memory"),
        ({"pools": {"a": PoolSection(roles=("ref",))}, "address": "auto"}, "shared_memory", "disk"),
        ({"address": "auto"}, "shared_memory", "shared_memory"),
        ({"gpus_per_node": 2}, "cuda_ipc", "nccl"),
        ({"gpus_per_node": 8, "nodes": 4}, "cuda_ipc", "nccl"),
        ({"gpus_per_node": 6, "pools": {"a": GENERATE}}, "nccl", "nccl"),
        ({"pools": {"a": GENERATE}}, "shared_memory", "shared_memory"),
        ({"gpus_per_node": 6, "pools": {"a": attrs.evolve(GENERATE, nodes=2)}}, "nccl", "nccl"),
    ],
)
def test_how_weights_travel_follows_from_where_trainer_and_rollout_live(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], transport: str, joined: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayConfig(**config).default_transport() == transport
    # Joined engines compute outside the pools, so the pools do not matter.
    assert RayConfig(**config).default_transport(joined=True) == joined


def test_pools_come_from_files_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: some/model}\n"
        "runtime:\n  name: ray\n  gpus_per_node: 6\n"
        "  pools: {generate: {roles: rollout, gpus_per_node: 2}}\n"
        "  ray_init: {object_store_memory: 1000000}\n"
    )
    loaded = load_config(path, ["runtime.pools.generate.nodes=2", "runtime.time_limits.update=60"])
    runtime: Any = loaded.config.runtime
    assert by_name(runtime)["generate"] == Pool(
        name="generate", roles=("rollout",), nodes=2, ranks_per_node=2, accelerators=True
    )
    assert runtime.time_limits == {"update": 60.0}
    assert runtime.ray_init == {"object_store_memory": 1000000}


def test_wrong_keys_and_values_are_all_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: some/model}\n"
        "runtime: {name: ray, nodes: 0, pools: {generate: {role: rollout, gpus_per_node: -1}}, "
        "time_limits: {update: 0}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    told = "\n".join(caught.value.problems)
    assert "runtime.nodes" in told
    assert "runtime.pools.generate.role" in told
    assert "runtime.pools.generate.gpus_per_node" in told
    assert "runtime.time_limits" in told
