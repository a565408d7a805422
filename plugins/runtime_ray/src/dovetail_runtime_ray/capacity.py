"""Free resources of a cluster's nodes, and whether the pools fit, checked before any process waits for resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from dovetail.errors import PlacementError
from dovetail.sections import Pool

EPSILON = 1e-4
"""Tolerance in comparing amounts of resources, which Ray counts in ten-thousandths."""


@attrs.frozen(kw_only=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    address: str
    host: str
    total: Mapping[str, float]
    """CPUs and GPUs of the node."""
    free: Mapping[str, float]
    """CPUs and GPUs of the node that are not reserved."""

    def described(self) -> str:
        """Return the node as text, such as `host (address): 7 of 8 GPUs, 60 of 64 CPUs free`."""
        parts = [
            f"{_number(self.free.get(kind, 0))} of {_number(self.total.get(kind, 0))} {kind}s"
            for kind in ("GPU", "CPU")
        ]
        return f"{self.host} ({self.address}): {', '.join(parts)} free"


@attrs.frozen(kw_only=True)
class Share:
    """The ranks of one pool that run on one node, and the resources that they reserve."""

    pool: Pool
    index: int
    """Index of the node among the pool's nodes."""
    rank: Mapping[str, float]
    """CPUs and GPUs that one of the pool's ranks reserves."""

    @property
    def needs(self) -> dict[str, float]:
        """CPUs and GPUs that all ranks of the share reserve together."""
        return {kind: amount * self.pool.ranks_per_node for kind, amount in self.rank.items()}


def shares(pools: Sequence[Pool], cpus_per_worker: int | None) -> list[Share]:
    """Return one share (a pool's ranks on one node) for each node of each pool."""
    found = []
    for pool in pools:
        rank: dict[str, float] = {"CPU": float(cpus_per_worker or 1)}
        if pool.accelerators:
            rank["GPU"] = 1.0
        found += [Share(pool=pool, index=index, rank=rank) for index in range(pool.nodes)]
    return found


def fit(wanted: Sequence[Share], nodes: Sequence[Node]) -> list[Node]:
    """Assign a node to each share (a pool's ranks on one node), and return the nodes in the order of the shares.

    Shares of one pool get different nodes; shares of different pools may get the same node.

    The largest shares are assigned first, each to the node that it fills best.

    Raises:
        PlacementError: the shares do not fit; names the requested resources and those that are free on every node.
    """
    free = {node.node_id: dict(node.free) for node in nodes}
    chosen: dict[int, Node] = {}
    order = sorted(
        range(len(wanted)),
        key=lambda i: (-wanted[i].needs.get("GPU", 0), -wanted[i].needs["CPU"], i),
    )
    for i in order:
        share = wanted[i]
        taken = {
            node.node_id for j, node in chosen.items() if wanted[j].pool.name == share.pool.name
        }
        others = {node.node_id for node in chosen.values()}
        possible = [
            node
            for node in nodes
            if node.node_id not in taken and _fits(share.needs, free[node.node_id])
        ]
        if not possible:
            raise _refusal(wanted, nodes)
        best = min(
            possible,
            key=lambda node: (
                free[node.node_id].get("GPU", 0),
                node.node_id not in others,
                free[node.node_id].get("CPU", 0),
                node.node_id,
            ),
        )
        for kind, amount in share.needs.items():
            free[best.node_id][kind] -= amount
        chosen[i] = best
    return [chosen[i] for i in range(len(wanted))]


def _fits(needs: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(kind, 0.0) >= amount - EPSILON for kind, amount in needs.items())


def _refusal(wanted: Sequence[Share], nodes: Sequence[Node]) -> PlacementError:
    asked = "; ".join(
        f"pool {pool.name!r} ({' + '.join(pool.roles)}): {pool.described()}, on each node "
        + " and ".join(
            f"{_number(amount)} {kind}{'s' * (amount != 1)}"
            for kind, amount in sorted(share.needs.items(), reverse=True)
        )
        for share in wanted
        if share.index == 0
        for pool in (share.pool,)
    )
    free = "; ".join(node.described() for node in nodes) or "no node"
    return PlacementError(
        f"the cluster lacks free resources that the run needs. Needed: {asked}. Free: {free}",
        hint=_advice(wanted, nodes),
    )


def _advice(wanted: Sequence[Share], nodes: Sequence[Node]) -> str:
    most = max((share.pool.nodes for share in wanted), default=1)
    if most > len(nodes):
        return f"add nodes with `ray start`, or set runtime.nodes to at most {len(nodes)}"
    kind = next(
        (
            kind
            for kind in ("GPU", "CPU")
            for share in wanted
            if share.needs.get(kind, 0)
            > max((node.total.get(kind, 0) for node in nodes), default=0) + EPSILON
        ),
        None,
    )
    if kind == "GPU":
        largest = max((node.total.get("GPU", 0) for node in nodes), default=0)
        if not largest:
            return "Ray found no GPU on any node: set runtime.workers_per_node in place of runtime.gpus_per_node"
        return f"set runtime.gpus_per_node to at most {_number(largest)}"
    if kind == "CPU":
        return "set runtime.workers_per_node or runtime.cpus_per_worker lower"
    return "wait until other jobs have ended (`ray status`), add nodes, or use fewer ranks"


def _number(amount: float) -> str:
    return f"{amount:.4g}"
