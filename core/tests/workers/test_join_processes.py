"""Processes that join at `tcp://host:port` listen there alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="listening sockets are read from /proc"
)

RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from dovetail.workers import join_processes, leave_processes

rank, port = int(sys.argv[1]), int(sys.argv[2])
join_processes(address=f"tcp://127.0.0.1:{port}", rank=rank, world=2, device="cpu", timeout=60)
one = torch.tensor([rank + 1])
dist.all_reduce(one)
if rank == 0:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A" and place.endswith(f":{port:04X}"):
                print(place)
dist.barrier()
print("sum", int(one))
leave_processes()
"""


def test_rank_0_listens_at_the_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0].split("\n") for rank in ranks]
    assert printed == [[f"0100007F:{port:04X}", "sum 3", ""], ["sum 3", ""]]
