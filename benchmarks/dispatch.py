"""What a call on two Ray workers costs beyond the work itself, and what the controller moves in a step.

    python benchmarks/dispatch.py
    python benchmarks/dispatch.py --rounds 15 --megabytes 10 100 --json

The batch has int64 prompts and responses, a mask and two float32 columns; a worker reads one value of every page and
returns a float32 column over the response. `torch.save` is the plain way: each half of the batch as bytes by torch.save,
a bare Ray actor that loads them and answers with bytes of its own, results loaded here. In each round every way
has one turn, so that a busy machine slows all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Future, Mesh
from dovetail.interfaces import PluginContext, PluginRef, TrainEngine, WorkerSpec
from dovetail.metrics import Max
from dovetail.workers import WorkerGroup
from dovetail.workers.group import run_on_worker
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.pool import RayGroup
from dovetail_runtime_ray.runtime import RayRuntime
from dovetail_runtime_ray.store import RayStore

PAGE = 4096
TOKENS = 1024
"""Prompt and response tokens of a sample, half each."""
BYTES_PER_SAMPLE = TOKENS // 2 * (8 + 8 + 1 + 4 + 4)
PASSES = ("old_log_probs", "ref_log_probs", "values")


class Reader(TrainEngine):
    """An engine that only reads, and returns as much as an engine does."""

    name = "reader"
    api = ">=3.0,<4"

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Batch:
        ids = batch["response_ids"]
        start = np.float32(read(column.values for column in ragged(batch).values()))
        return Batch(
            {name: ids.with_values(np.full(len(ids.values), start, np.float32)) for name in outputs}
        )

    def update(self, mini_batch: Batch, objective: Any) -> dict[str, Any]:
        return {"actor/read": Max(read(column.values for column in ragged(mini_batch).values()))}

    def offload(self) -> None:
        """Nothing: an empty call."""

    def weight_manifest(self, version: int) -> Any:
        return None

    def send_weights(self, version: int, manifest: Any) -> None:
        return None

    def save(self, directory: Path) -> None:
        return None

    load = export = save


def ragged(batch: Batch) -> dict[str, Ragged]:
    """The ragged columns."""
    return {n: column for n, column in batch.columns.items() if isinstance(column, Ragged)}


def read(arrays: Any) -> float:
    """Touch every page."""
    return float(sum(array[:: PAGE // array.itemsize].sum() for array in arrays))


class Plain:
    """One bare actor: bytes in, bytes out; or batches, pickled by Ray as they are."""

    def __init__(self, rank: int) -> None:
        self._engine = Reader(Reader.Config(name="reader"), PluginContext(rank=rank))

    def nothing(self) -> None:
        """An empty call."""

    def forward(self, data: bytes) -> bytes:
        tensors = torch.load(io.BytesIO(data))
        start = read(values.numpy() for values, _ in tensors.values())
        values, offsets = tensors["response_ids"]
        return saved({"log_probs": (torch.full((len(values),), start), offsets)})

    def call(self, box: list[Any]) -> Any:
        method, call = box
        return run_on_worker(self._engine, method, call)


def saved(tensors: Any) -> bytes:
    """By torch.save."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def as_tensors(batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and offsets of each ragged column, without a copy."""
    return {
        name: (
            torch.from_numpy(np.require(c.values, requirements="W")),
            torch.from_numpy(c.offsets),
        )
        for name, c in ragged(batch).items()
    }


class PlainGroup(WorkerGroup):
    """Batches travel with every call, and results come back to the controller."""

    def __init__(self, actors: Sequence[Any], mesh: Mesh) -> None:
        super().__init__(Reader, mesh, role="plain")
        self._actors, self.moved = actors, 0

    def _invoke(self, method: str, calls: Sequence[Any]) -> Future[list[Any]]:
        self.moved += sum(size(call) for call in calls)
        sent = [a.call.remote([method, c]) for a, c in zip(self._actors, calls, strict=True)]

        def results(timeout: float | None) -> list[Any]:
            found = ray.get(sent, timeout=timeout)
            self.moved += sum(map(size, found))
            return list(found)

        return Future(results)

    def close(self) -> None:
        """The actors end with the cluster."""


class Counted:
    """A codec and its store that count the bytes which pass through the controller."""

    def __init__(self) -> None:
        self._codec, self._store, self.moved = BatchCodec(self), RayStore(), 0

    def put(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        self.moved += sum(array.nbytes for array in arrays)
        return self._store.put(arrays)

    def get(self, references: Sequence[Any]) -> list[np.ndarray]:
        arrays = self._store.get(references)
        self.moved += sum(array.nbytes for array in arrays)
        return arrays

    def encode(self, calls: Sequence[Any]) -> list[Any]:
        payloads = self._codec.encode(calls)
        self.moved += sum(map(size, payloads))
        return payloads

    def decode_results(self, results: Sequence[Any]) -> list[Any]:
        self.moved += sum(map(size, results))
        return self._codec.decode_results(results)

    def close(self) -> None:
        self._codec.close()


def size(value: Any) -> int:
    """Bytes of a value on its way; those of a reference about as many as Ray sends."""
    buffers: list[pickle.PickleBuffer] = []
    data = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(data) + sum(buffer.raw().nbytes for buffer in buffers)


def batch_of(samples: int, tokens: int = TOKENS) -> Batch:
    """A fresh batch; half of each sample's tokens are the response."""
    offsets = np.arange(samples + 1) * (tokens // 2)
    ids = Ragged(np.arange(offsets[-1]), offsets)
    return Batch(
        {
            "group_id": np.arange(samples) // 8,
            "prompt_ids": ids,
            "response_ids": ids.with_values(ids.values + 1),
            "response_mask": ids.with_values(np.ones(len(ids.values), np.bool_)),
            "rollout_log_probs": ids.with_values(np.zeros(len(ids.values), np.float32)),
            "advantages": ids.with_values(np.ones(len(ids.values), np.float32)),
            "sample_id": [f"sample-{i}" for i in range(samples)],
        }
    )


def alternated(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, in turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            gc.collect()
            prepared = way()
            began = time.perf_counter()
            kept = prepared()
            if number:
                times[name].append((time.perf_counter() - began) * 1000)
            del kept, prepared
    return {name: statistics.median(values) for name, values in times.items()}


def ways_of(group: WorkerGroup, actors: Sequence[Any], samples: int, tokens: int) -> dict[str, Any]:
    """Ways to send a batch and get a column back; each prepares, and returns what is timed."""
    known = batch_of(samples, tokens)
    halves = known.split([samples - samples // 2, samples // 2])

    def forward(batch: Batch) -> Batch:
        return group.forward(batch, frozenset({"log_probs"})).result()

    def first(then: Callable[[Batch], Any]) -> Callable[[], Any]:
        batch = batch_of(samples, tokens)
        return lambda: then(forward(batch))

    def again() -> Callable[[], Any]:
        forward(known)
        return lambda: forward(known)

    def through_bytes() -> list[Any]:
        sent = [a.forward.remote(saved(as_tensors(h))) for a, h in zip(actors, halves, strict=True)]
        return [torch.load(io.BytesIO(data)) for data in ray.get(sent)]

    def in_process() -> list[Any]:
        there = [torch.load(io.BytesIO(saved(as_tensors(half)))) for half in halves]
        back = [saved({"log_probs": tensors["rollout_log_probs"]}) for tensors in there]
        return [torch.load(io.BytesIO(data)) for data in back]

    return {
        "dovetail, batch not seen before": lambda: first(lambda scored: scored),
        "... and its result read here": lambda: first(lambda scored: scored["log_probs"].values),
        "dovetail, batch of an earlier call": again,
        "torch.save over bare actors": lambda: through_bytes,
        "torch.save without any transport": lambda: in_process,
    }


def step(group: WorkerGroup, batch: Batch) -> None:
    """Three forward passes and an update over the batch with their results."""
    for name in PASSES:
        batch = batch.with_columns(group.forward(batch, frozenset({name})).result().columns)
    group.update(batch, None).result()


def started() -> tuple[RayRuntime, RayGroup, list[Any]]:
    """The runtime with a group of two workers, and two bare actors."""
    config = RayConfig(
        name="ray", workers_per_node=2, ray_init={"object_store_memory": 2 << 30}, device="cpu"
    )
    runtime = RayRuntime(config, PluginContext())
    runtime.start()
    runtime.place(config.pools_for(["actor"]))
    ref = PluginRef(
        kind="engine",
        name="reader",
        path=str(Path(__file__).resolve()),
        attribute="Reader",
        config=Reader.Config(name="reader"),
    )
    spec = WorkerSpec(role="actor", plugin=ref, context=PluginContext(role="actor"))
    group = runtime.worker_group(spec, Mesh.over(2))
    bare = ray.remote(num_cpus=0)(Plain)
    return runtime, group, [bare.remote(rank) for rank in range(2)]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, in milliseconds and megabytes."""
    runtime, group, actors = started()
    try:
        calls = {
            "dovetail": lambda: lambda: group.offload().result(),
            "bare actors": lambda: lambda: ray.get([actor.nothing.remote() for actor in actors]),
        }
        small = ways_of(group, actors, 8, 64)
        found: dict[str, Any] = {
            "cores": os.cpu_count(),
            "ray": ray.__version__,
            "empty call": alternated(calls, options.rounds * 10),
            "8 samples of 64 tokens": alternated(small, options.rounds * 3),
        }
        for megabytes in options.megabytes:
            samples = round(megabytes * 1e6 / BYTES_PER_SAMPLE)
            ways = ways_of(group, actors, samples, TOKENS)
            found[f"{megabytes} MB"] = alternated(ways, options.rounds)
            del ways
            found[f"step over {megabytes} MB"] = steps(group, actors, samples, options.rounds)
        return found
    finally:
        runtime.close()


def steps(group: RayGroup, actors: Sequence[Any], samples: int, rounds: int) -> dict[str, Any]:
    """Bytes through the controller in a step, and its time, with and without references."""
    plain = PlainGroup(actors, group.mesh)
    counted = Counted()
    by_reference = RayGroup(Reader, group.mesh, "actor", group._processes, counted)  # noqa: SLF001
    step(by_reference, batch_of(samples))
    step(plain, batch_of(samples))
    moved = {"by reference": counted.moved, "everything with every call": plain.moved}

    def fresh(which: WorkerGroup) -> Callable[[], Any]:
        batch = batch_of(samples)
        return lambda: step(which, batch)

    ways = {
        "by reference": lambda: fresh(group),
        "everything with every call": lambda: fresh(plain),
    }
    times = alternated(ways, rounds)
    return {
        name: {"ms": value, "MB through the controller": round(moved[name] / 1e6, 2)}
        for name, value in times.items()
    }


def main() -> None:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--json", action="store_true")
    found = measured(options := parser.parse_args())
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{found.pop('cores')} cores, ray {found.pop('ray')}; medians of {options.rounds} rounds")
    for title, rows in found.items():
        print(f"\n{title}")
        first = None
        for name, row in rows.items():
            ms = row["ms"] if isinstance(row, dict) else row
            first = first or ms
            moved = (
                "" if not isinstance(row, dict) else f"{row['MB through the controller']:>10} MB"
            )
            print(f"  {name:<38}{ms:>10.2f} ms{ms / first:>8.2f} ×{moved}")


if __name__ == "__main__":
    main()
