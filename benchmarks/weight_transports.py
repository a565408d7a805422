"""Seconds of a weight update between two processes: `python benchmarks/weight_transports.py --model 0.5b`.

This process sends a model's worth of bfloat16 tensors; another receives them and copies each into parameters of its
own, as a rollout does. An update is timed from the call of both until both have returned. Ways alternate round by
round; medians are shown. On GPUs they are `cuda_ipc` on one GPU, `nccl` between two where there are two, and
`shared_memory`; `in_process` hands the tensors over in this process, and its receiver copies them as well.

`memcpy` is one plain copy of the same tensors on the sender's device: every way but `in_process` takes two, into the
buckets and out of them. `digests` is what proving the bytes costs on one side; the proof of an update takes two.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from dovetail.interfaces import PluginContext, TensorSpec, WeightManifest, WeightTransport
from dovetail_rollouts.transports.config import DiskTransportConfig, InProcessTransportConfig
from dovetail_rollouts.transports.disk import DiskTransport
from dovetail_rollouts.transports.in_process import InProcessTransport
from dovetail_rollouts.transports.tensor_digest import tensor_digests
from dovetail_transports.config import CudaIpcConfig, NcclConfig, SharedMemoryConfig
from dovetail_transports.cuda_ipc.transport import CudaIpcTransport
from dovetail_transports.nccl.transport import NcclTransport
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

MODELS = {"0.5b": (896, 4864, 128, 24, 0.99), "1.5b": (1536, 8960, 256, 28, 3.09)}
"""Hidden size, that of the feed-forward layers, of the keys, number of layers, and GB in bfloat16 (Qwen2.5)."""
VOCABULARY = 151_936


def shapes(model: str, gigabytes: float | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes like those of Qwen2.5, with fewer layers and a smaller vocabulary where a size is given."""
    hidden, inner, keys, layers, whole = MODELS[model]
    share = 1.0 if gigabytes is None else gigabytes / whole
    found: dict[str, tuple[int, ...]] = {"embed": (max(1, int(VOCABULARY * share)), hidden)}
    for layer in range(max(1, round(layers * share))):
        sizes = {
            "q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden),
            "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner), "norm1": (hidden,),
            "norm2": (hidden,), "q_bias": (hidden,), "k_bias": (keys,), "v_bias": (keys,),
        }  # fmt: skip
        found |= {f"layers.{layer}.{name}": shape for name, shape in sizes.items()}
    return found


@attrs.frozen(kw_only=True)
class Way:
    """One way to send, and what the other process needs to take part."""

    name: str
    verify: bool
    folder: str
    device: str
    receiver_device: str
    shapes: dict[str, tuple[int, ...]]
    bucket_bytes: int

    @property
    def title(self) -> str:
        """For the table."""
        return self.name if self.verify else f"{self.name}, no digests"

    def transport(self, side: str) -> WeightTransport:
        """The transport in this process."""
        device = self.device if side == "sender" else self.receiver_device
        context = PluginContext(run_directory=Path(self.folder), device=device, role=side)
        match self.name:
            case "cuda_ipc":
                return CudaIpcTransport(CudaIpcConfig(name="cuda_ipc", verify=self.verify), context)
            case "nccl" | "gloo":
                return NcclTransport(NcclConfig(name="nccl", verify=self.verify), context)
            case "shared_memory":
                config = SharedMemoryConfig(name="shared_memory", verify=self.verify)
                return SharedMemoryTransport(config, context)
            case "in_process":
                return InProcessTransport(InProcessTransportConfig(verify=self.verify), context)
        directory = str(Path(self.folder) / "weights")
        disk = DiskTransportConfig(directory=directory, verify=self.verify, keep=1)
        return DiskTransport(disk, context)

    def parameters(self) -> dict[str, Tensor]:
        """What a rollout loads into."""
        return {
            name: torch.empty(shape, dtype=torch.bfloat16, device=self.receiver_device)
            for name, shape in self.shapes.items()
        }


def load(
    receiver: Any, manifest: WeightManifest, parameters: dict[str, Tensor], device: str
) -> None:
    """Copy an update into parameters."""
    for name, tensor in receiver.receive(manifest):
        parameters[name].copy_(tensor)
    synchronize(device)


def receiving(pipe: Any, way: Way) -> None:
    """The other process: loads every update that it is told of into its parameters."""
    parameters = way.parameters()
    receiver = way.transport("receiver").receiver()
    pipe.send("ready")
    while (manifest := pipe.recv()) is not None:
        load(receiver, manifest, parameters, way.receiver_device)
        pipe.send(float(parameters["embed"][0, 0]))
    receiver.close()


def synchronize(device: str) -> None:
    """Wait for an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize(torch.device(device))


class Pair:
    """A sender here and a receiver in a process of its own; here as well where the way is `in_process`."""

    def __init__(self, way: Way, tensors: dict[str, Tensor]) -> None:
        self._way, self._tensors, self._version = way, tensors, 0
        transport = way.transport("sender")
        self._sender = transport.sender()
        self._own: tuple[Any, dict[str, Tensor]] | None = None
        if way.name == "in_process":
            self._own = (transport.receiver(), way.parameters())
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receiving, args=(theirs, way), daemon=True)
        self._process.start()
        if self._pipe.recv() != "ready":
            raise SystemExit("the receiver did not start")

    def update(self) -> float:
        """Seconds of one update."""
        self._version = self._version % 200 + 1  # whole numbers that bfloat16 has
        self._tensors["embed"][0, 0] = self._version
        specs = tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype="bfloat16")
            for name, tensor in self._tensors.items()
        )
        manifest = WeightManifest(
            version=self._version, tensors=specs, receivers=1, bucket_bytes=self._way.bucket_bytes
        )
        manifest = self._sender.prepare(manifest)
        synchronize(self._way.device)
        began = time.perf_counter()
        if self._own is not None:
            receiver, parameters = self._own
            self._sender.send(manifest, self._tensors.items())
            load(receiver, manifest, parameters, self._way.device)
            arrived = None
        else:
            self._pipe.send(manifest)
            self._sender.send(manifest, self._tensors.items())
            arrived = self._pipe.recv()
        seconds = time.perf_counter() - began
        if arrived is None and self._own is not None:
            arrived = float(self._own[1]["embed"][0, 0])
        if arrived != self._version:
            raise SystemExit(f"{arrived} arrived in place of {self._version} by {self._way.title}")
        return seconds

    def close(self) -> None:
        """End the other process."""
        if self._own is None:
            self._pipe.send(None)
            self._process.join()
        self._sender.close()


def ways_here(device: str) -> tuple[str, ...]:
    """Those that make sense between the devices that are there."""
    if device == "cpu":
        return ("in_process", "shared_memory", "gloo", "disk")
    separate = ("nccl",) if torch.accelerator.device_count() > 1 else ()
    return ("in_process", "cuda_ipc", *separate, "shared_memory")


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="0.5b", help="whose shapes")
    parser.add_argument("--gigabytes", type=float, help="so much of them; absent: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=256)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=f"{accelerator.type}:0" if accelerator else "cpu")
    parser.add_argument("--ways", help="comma-separated; absent: all that fit the devices")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    wanted = shapes(args.model, args.gigabytes)
    tensors = {n: torch.randn(s, device=args.device).bfloat16() for n, s in wanted.items()}
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    names = tuple(args.ways.split(",")) if args.ways else ways_here(args.device)

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
    with TemporaryDirectory() as folder:
        pairs = []
        for name in names:
            for verify in (True, False):
                away = f"{torch.device(args.device).type}:1" if name == "nccl" else args.device
                way = Way(
                    name=name, verify=verify, folder=f"{folder}/{name}-{verify}", device=args.device,
                    receiver_device=away, shapes=wanted, bucket_bytes=args.bucket_mib << 20,
                )  # fmt: skip
                pairs.append(Pair(way, tensors))
                measured[way.title] = pairs[-1].update
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(args.rounds + 2):
            for name, measure in measured.items():
                value = measure()
                if number > 1:  # the first rounds warm up
                    seconds[name].append(value)
        for pair in pairs:
            pair.close()
    show(args, names, seconds, size, len(tensors))


def show(
    args: argparse.Namespace,
    names: tuple[str, ...],
    seconds: dict[str, list[float]],
    size: int,
    tensors: int,
) -> None:
    """Print the medians."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if args.json:
        print(json.dumps({"bytes": size, "tensors": tensors, "seconds": medians}))
        return
    print(
        f"{size / 1e9:.2f} GB in {tensors} tensors on {args.device}, buckets of {args.bucket_mib} MiB, "
        f"{args.rounds} rounds; torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    for name, value in medians.items():
        print(
            f"{name:28s} {value * 1000:9.2f} ms  {size / value / 1e9:8.2f} GB/s  least "
            f"{min(seconds[name]) * 1000:9.2f} ms  {value / medians['memcpy']:6.2f} × memcpy"
        )
    for name in names:
        proof = 1 - medians[f"{name}, no digests"] / medians[name]
        print(f"{name}: digests take {proof * 100:.1f}% of an update")


if __name__ == "__main__":
    main()
