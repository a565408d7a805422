"""The processes of a pool: their environment, torch's process group, and sums over the ranks that share a batch.

torch is imported at the first call.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from dovetail.dispatch.mesh import Mesh
from dovetail.interfaces.plugin import LocalReduction, Reduction


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within the block, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def join_processes(
    *, address: str, rank: int, world: int, device: str, timeout: float = 1800.0
) -> None:
    """Join torch's default process group as a rank; every rank must call it.

    CPU tensors go over gloo, accelerator tensors over the accelerator's own library.

    torch's rendezvous store has no password: any process that connects can read and change how the ranks find each other. Therefore rank 0
    listens at the address of `tcp://host:port` alone, not at every address of the machine as torch would.

    Args:
        address: `file:///path`, a file that only these processes share, or `tcp://host:port`, at which rank 0 listens.
        rank: this process's rank.
        world: number of ranks.
        device: the rank's torch device, such as `cpu` or an accelerator with its index.
        timeout: seconds after which a collective that not all ranks have joined fails.
    """
    import torch
    import torch.distributed as dist

    kind = torch.device(device).type
    backend = "gloo"
    if kind != "cpu":
        # The group is not bound to a device (`device_id`): when a gloo subgroup of a bound group is created, the ranks outside
        # the subgroup split the accelerators' communicator, and the ranks inside do not.
        torch.accelerator.set_device_index(torch.device(device).index or 0)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    limit = timedelta(seconds=timeout)
    store = _tcp_store(address, rank, world, limit) if address.startswith("tcp://") else None
    dist.init_process_group(
        backend,
        init_method=address if store is None else None,
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
    )


def _tcp_store(address: str, rank: int, world: int, limit: timedelta) -> Any:
    import torch.distributed as dist

    host, _, port = address.removeprefix("tcp://").rpartition(":")
    fd: int | None = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        fd = socket.create_server((host, int(port)), family=family, backlog=world).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), world, rank == 0, limit, master_listen_fd=fd
    )


def leave_processes() -> None:
    """Leave the default process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class ProcessReduction:
    """Sums over the processes of a torch group in rank order, bit-identical on every rank and in every run.

    Args:
        group: a torch process group that carries CPU tensors.
        size: the number of ranks.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group, self._size = group, size

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum an array element by element over the ranks; shape and dtype must be the same on every rank."""
        import torch
        import torch.distributed as dist

        given = np.ascontiguousarray(values)
        mine = torch.from_numpy(given.copy())
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(parts, mine, group=self._group)
        total = np.zeros_like(given)
        for part in parts:
            total += part.numpy()
        return total.reshape(np.shape(values))


def reduction_over(mesh: Mesh, rank: int, axis: str = "dp") -> Reduction:
    """Return the reduction over one axis of a mesh, for one rank of the mesh.

    Every rank of the default process group must call this function with the same mesh: groups are made collectively.
    """
    if mesh.size == 1:
        return LocalReduction()
    import torch.distributed as dist

    mine: Reduction = LocalReduction()
    for ranks in mesh.groups(axis):
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        if rank in ranks and group is not None:
            mine = ProcessReduction(group, len(ranks))
    return mine
