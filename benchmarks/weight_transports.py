"""Seconds of a weight update between two processes: `python benchmarks/weight_transports.py --gigabytes 1`.

This process sends a model's worth of bfloat16 tensors; another receives them and copies each into parameters of its
own, as a rollout does. An update is timed from the call of both until both have returned. Ways alternate round by
round; medians are shown. `memcpy` is one plain copy of the same tensors in this process: shared memory takes two, one
into the slots and one out of them, in two processes at once. `digests` is what proving the bytes costs on one side.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dovetail.config.builtin import DiskTransportConfig
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import TensorSpec, WeightManifest
from dovetail.numerics import tensor_digests
from dovetail.transports.disk import DiskTransport
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

WAYS = ("shared_memory", "disk in memory", "disk")


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes like those of Qwen2.5-0.5B, with as many layers as fill so many GB in bfloat16."""
    found: dict[str, tuple[int, ...]] = {"embed": (min(151_936, int(gigabytes * 7e7)), 896)}
    left, layer = gigabytes * 1e9 / 2 - math.prod(found["embed"]), 0
    while left > 0:
        sizes = {
            "q": (896, 896), "k": (128, 896), "v": (128, 896), "o": (896, 896), "gate": (4864, 896),
            "up": (4864, 896), "down": (896, 4864), "norm1": (896,), "norm2": (896,), "bias": (896,),
        }  # fmt: skip
        found |= {f"layers.{layer}.{name}": shape for name, shape in sizes.items()}
        left -= sum(math.prod(shape) for shape in sizes.values())
        layer += 1
    return found


def transport(way: str, folder: str, memory: str, device: str, *, verify: bool) -> Any:
    """One process's transport."""
    context = PluginContext(run_directory=Path(folder), device=device)
    if way == "shared_memory":
        return SharedMemoryTransport(SharedMemoryConfig(name=way, verify=verify), context)
    directory = str(Path(memory if way == "disk in memory" else folder) / "weights")
    return DiskTransport(DiskTransportConfig(directory=directory, verify=verify, keep=1), context)


def receiving(pipe: Any, arguments: dict[str, Any], device: str, gigabytes: float) -> None:
    """The other process: loads every update that it is told of into its parameters."""
    parameters = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes(gigabytes).items()
    }
    receiver = transport(**arguments, device=device).receiver()
    pipe.send("ready")
    while (manifest := pipe.recv()) is not None:
        for name, tensor in receiver.receive(manifest):
            parameters[name].copy_(tensor)
        synchronize(device)
        pipe.send(float(next(iter(parameters.values()))[0, 0]))
    receiver.close()


def synchronize(device: str) -> None:
    """Wait for an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize()


class Way:
    """A transport between this process and one of its own."""

    def __init__(
        self, arguments: dict[str, Any], tensors: dict[str, Tensor], device: str, gigabytes: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=receiving, args=(theirs, arguments, device, gigabytes), daemon=True
        )
        self._process.start()
        if self._pipe.recv() != "ready":
            raise SystemExit("the receiver did not start")
        self._sender = transport(**arguments, device=device).sender()
        self._tensors, self._device, self._version = tensors, device, 0

    def update(self) -> float:
        """Seconds of one update."""
        self._version += 1
        self._tensors["embed"][0, 0] = self._version
        specs = tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype="bfloat16")
            for name, tensor in self._tensors.items()
        )
        manifest = WeightManifest(version=self._version, tensors=specs)
        synchronize(self._device)
        began = time.perf_counter()
        self._pipe.send(manifest)
        self._sender.send(manifest, self._tensors.items())
        arrived = self._pipe.recv()
        seconds = time.perf_counter() - began
        if arrived != self._version:
            raise SystemExit(f"{arrived} arrived in place of {self._version}")
        return seconds

    def close(self) -> None:
        """End the other process."""
        self._pipe.send(None)
        self._process.join()
        self._sender.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of the model in bfloat16"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="of the tensors on both sides")
    parser.add_argument(
        "--disk", help="a directory on a disk; by default the one for temporary files"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tensors = {
        name: torch.randn(shape, device=args.device).bfloat16()
        for name, shape in shapes(args.gigabytes).items()
    }
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())

    def timed(act: Callable[[], Any]) -> float:
        synchronize(args.device)
        began = time.perf_counter()
        act()
        synchronize(args.device)
        return time.perf_counter() - began

    measured: dict[str, Callable[[], float]] = {
        "memcpy": lambda: timed(lambda: [copies[n].copy_(t) for n, t in tensors.items()]),
        "digests": lambda: timed(lambda: tensor_digests(list(tensors.values()))),
    }
    with TemporaryDirectory(dir=args.disk) as folder, TemporaryDirectory(dir="/dev/shm") as memory:
        ways = []
        for name in WAYS:
            for verify in (True, False):
                place = Path(folder) / f"{name} {verify}"
                inside = Path(memory) / f"{name} {verify}"
                arguments = {
                    "way": name, "folder": str(place), "memory": str(inside), "verify": verify,
                }  # fmt: skip
                ways.append(Way(arguments, tensors, args.device, args.gigabytes))
                measured[name if verify else f"{name}, no digests"] = ways[-1].update
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(args.rounds + 1):
            for name, measure in measured.items():
                value = measure()
                if number:  # the first round warms up
                    seconds[name].append(value)
        for way in ways:
            way.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if args.json:
        print(json.dumps({"bytes": size, "seconds": medians}))
        return
    print(
        f"{size / 1e9:.2f} GB in {len(tensors)} tensors on {args.device}, {args.rounds} rounds; torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    for name, value in medians.items():
        print(
            f"{name:28s} {value:7.3f} s  {size / value / 1e9:6.2f} GB/s  least {min(seconds[name]):.3f} s"
        )


if __name__ == "__main__":
    main()
