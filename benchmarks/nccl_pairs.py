"""Which settings of NCCL let two processes of one machine be a group, as a trainer and a rollout's server are.

    python benchmarks/nccl_pairs.py
    python benchmarks/nccl_pairs.py --case NCCL_P2P_DISABLE=1 --case '/NCCL_CUMEM_ENABLE=0' --debug INFO

Each case starts two processes that know nothing of each other, rank 0 on the first GPU and rank 1 on the second, and has rank 0
broadcast 64 MiB. Rank 1 has a group of its own before, as a server has. A case is `SETTINGS` for both of them, or
`SETTINGS/SETTINGS` for each: names with values, with commas between them; `NAME=` takes a variable out. All cases run side by
side, so that the whole takes as long as the slowest: no longer than `--limit`. Prints a line of JSON a case, `worked`,
`refused` (NCCL raised an error), `wrong` (other numbers came) or `hung`, with what NCCL had to say, and exits with 1 where the
first case did not work. It needs torch and two GPUs; `--backend gloo` tries the program itself on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import IO, Any

CUMEM = "NCCL_CUMEM_ENABLE"
CASES = (
    f"{CUMEM}=",
    f"{CUMEM}=/{CUMEM}=-2",
    f"{CUMEM}=/{CUMEM}=1",
    f"{CUMEM}=/{CUMEM}=0",
    f"{CUMEM}=0",
    f"{CUMEM}=1",
)
"""NCCL's own choice; a server that says so in words; SGLang's default against a trainer that has none; both the same."""
ELEMENTS = 16 << 20
TOLD = 1200
"""Characters of a process's output that are shown, its last ones."""


def settings(text: str) -> dict[str, str]:
    """`A=1,B=` as names and values."""
    found = dict(part.partition("=")[::2] for part in text.split(",") if part)
    for name in found:
        if not name.isidentifier():
            sys.exit(f"{text!r} is no list of NAME=VALUE with commas between them")
    return found


def start(
    case: str, rank: int, port: int, args: argparse.Namespace
) -> tuple[subprocess.Popen[str], IO[str]]:
    """One of a case's two processes, and what it prints: a file, since NCCL may say more than a pipe holds."""
    both, slash, other = case.partition("/")
    environment = {**os.environ, "NCCL_DEBUG": args.debug, "PYTHONUNBUFFERED": "1"}
    # As a runtime gives a worker its accelerators.
    environment["CUDA_VISIBLE_DEVICES"] = args.gpus.split(",")[rank]
    for name, value in settings(other if slash and rank else both).items():
        environment.pop(name, None)
        if value:
            environment[name] = value
    words = [str(rank), str(port), args.backend, str(args.limit)]
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *words],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, output


def say(line: str) -> None:
    """Write a line where `verdict` reads it, at once: the process may be killed next."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def child(rank: int, port: int, backend: str, limit: float) -> None:
    """One rank's part; prints `worked` or `wrong` last."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    if rank:
        # An engine's own group, with a collective that has gone through it.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=limit)
        )
        dist.all_reduce(torch.ones(1, device=device))
    c10d: Any = dist
    store = c10d.TCPStore(
        "127.0.0.1", port, None, not rank, timedelta(seconds=limit), wait_for_workers=False
    )
    if backend == "nccl":
        say(f"NCCL {torch.cuda.nccl.version()}, {CUMEM}={os.environ.get(CUMEM)}")
        group = c10d.ProcessGroupNCCL(store, rank, 2, c10d.ProcessGroupNCCL.Options())
    else:
        group = c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=limit))
    octets = torch.full((ELEMENTS,), 7.0 if rank == 0 else 0.0, device=device)
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work = group.broadcast([octets], options)
        while not work.is_completed():
            time.sleep(0.0005)
        work.wait()
        if backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    rate = octets.nbytes / seconds[-1] / 1e9
    say(f"made in {seconds[0]:.2f} s, then {rate:.1f} GB/s")
    store.set(f"done {rank}", "1")
    store.wait([f"done {1 - rank}"], timedelta(seconds=limit))
    say("worked" if bool((octets == 7.0).all()) else "wrong")
    # Nothing is taken down in order: what is asked is whether the bytes came.
    os._exit(0)


def verdict(
    processes: list[tuple[subprocess.Popen[str], IO[str]]], deadline: float
) -> dict[str, Any]:
    """How a case ended: both processes, or the deadline (of the monotonic clock), are awaited."""
    said, ends = [], []
    for process, output in processes:
        hung = False
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            process.wait()
        output.seek(0)
        out = output.read()
        last = out.split()[-1:] if process.returncode == 0 else []
        ended = last[0] if last and last[0] in {"worked", "wrong"} else "refused"
        ends.append("hung" if hung else ended)
        said.append(out[-TOLD:])
    order = ("refused", "wrong", "hung", "worked")
    result: dict[str, Any] = {"came_to": min(ends, key=order.index), "each": ends}
    rates = [line for out in said for line in out.splitlines() if line.startswith("made in")]
    return result | ({"broadcast": rates[-1]} if rates else {}) | {"said": said}


def free_port() -> int:
    """A port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Run the cases; the exit status is 0 where the first one worked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", help="in place of the usual ones; may be repeated"
    )
    parser.add_argument("--gpus", default="0,1", help="of rank 0 and rank 1")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds for all of it")
    parser.add_argument("--debug", default="WARN", help="NCCL_DEBUG")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    cases = args.case or list(CASES)
    running = []
    try:
        for case in cases:
            port = free_port()
            running.append([start(case, rank, port, args) for rank in (0, 1)])
        found = []
        for case, processes in zip(cases, running, strict=True):
            found.append(verdict(processes, deadline))
            sys.stdout.write(json.dumps({"case": case, **found[-1]}) + "\n")
            sys.stdout.flush()
    finally:
        for process, _ in (one for pair in running for one in pair):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return 0 if found[0]["came_to"] == "worked" else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    raise SystemExit(main())
