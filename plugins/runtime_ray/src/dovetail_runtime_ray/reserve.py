"""Placement groups: reserve the pools' resources on the nodes chosen for them, one bundle a rank."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dovetail.errors import PlacementError
from dovetail.sections import Pool
from dovetail_runtime_ray.capacity import Node, Share

RESERVE_SECONDS = 30.0
"""Seconds that Ray may take to reserve resources that are free."""


@attrs.frozen(kw_only=True, eq=False)
class Reserved:
    """The placement groups of a pool: one group for each node, with one bundle for each rank."""

    pool: Pool
    groups: tuple[PlacementGroup, ...]
    nodes: tuple[Node, ...]

    def options(self, rank: int, *, parts: int) -> dict[str, Any]:
        """Return Ray's options for an actor in a rank's bundle.

        All actors of a bundle share its CPUs.

        Args:
            rank: the rank in the pool.
            parts: number of actors that share the rank's accelerator; 0 for an actor without an accelerator.
        """
        node, bundle = divmod(rank, self.pool.ranks_per_node)
        share = 1.0 / parts if self.pool.accelerators and parts else 0
        return {
            "num_cpus": 0,
            "num_gpus": share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.groups[node], placement_group_bundle_index=bundle
            ),
        }

    def node(self, rank: int) -> Node:
        """Return the node of a rank of the pool."""
        return self.nodes[rank // self.pool.ranks_per_node]


def reserve(shares: Sequence[Share], nodes: Sequence[Node]) -> dict[str, Reserved]:
    """Make the placement groups of all pools, and return them by the pool's name.

    Args:
        shares: the shares of all pools; a share is a pool's ranks on one node.
        nodes: the node of each share, in the same order.

    Raises:
        PlacementError: Ray did not reserve the resources in time; another program may have taken them.
    """
    groups: list[PlacementGroup] = []
    ours = uuid.uuid4().hex[:8]  # names must be unique in a cluster's namespace
    try:
        for share, node in zip(shares, nodes, strict=True):
            count = share.pool.ranks_per_node
            groups.append(
                placement_group(
                    [dict(share.rank)] * count,
                    strategy="STRICT_PACK",
                    name=f"dovetail-{ours}-{share.pool.name}-{share.index}",
                    bundle_label_selector=[{"ray.io/node-id": node.node_id}] * count,
                )
            )
        _wait(groups, shares, nodes)
    except BaseException:
        release(groups)
        raise
    found: dict[str, Reserved] = {}
    for name, pool in {share.pool.name: share.pool for share in shares}.items():
        mine = [i for i, share in enumerate(shares) if share.pool.name == name]
        found[name] = Reserved(
            pool=pool,
            groups=tuple(groups[i] for i in mine),
            nodes=tuple(nodes[i] for i in mine),
        )
    return found


def release(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups, which frees their resources."""
    for group in groups:
        remove_placement_group(group)


def _wait(groups: Sequence[PlacementGroup], shares: Sequence[Share], nodes: Sequence[Node]) -> None:
    refs = {group.ready(): i for i, group in enumerate(groups)}
    _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=RESERVE_SECONDS)
    if not waiting:
        return
    missing = sorted(refs[ref] for ref in waiting)
    listed = "; ".join(
        f"pool {shares[i].pool.name!r}: {_needs(shares[i].needs)} on {nodes[i].described()}"
        for i in missing
    )
    raise PlacementError(
        f"Ray did not reserve these resources within {RESERVE_SECONDS:g} seconds, although they were free before: {listed}",
        hint="another job may have taken them; see `ray status`, and try again",
    )


def _needs(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}{'s' * (amount != 1)}" for kind, amount in needs.items())
