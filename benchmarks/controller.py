"""Where the controller becomes the limit: its time in a step of three forward passes and an update, over up to 256 ranks.

    python benchmarks/controller.py
    python benchmarks/controller.py --ranks 64 256 --a-rank 32 --tokens 4096 --rounds 9

The ranks are stubs that answer at once. Each has its own call and its own share of the batch, which travels as in a run on Ray:
divided by tokens, packed, its columns put into Ray's store, submitted, the results fetched and merged. The calls go to two real
actors that stand for all of the ranks, so that 256 processes are not needed. `processor` is the time that the controller's process
has computed, in all of its threads, and what a machine of its own would take; `wall` has the actors' work on the same cores in it.

Prints a line of JSON for each number of ranks: medians of the rounds, in milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from dispatch import PASSES, batch_of, step
from executor import StubEngine

from dovetail.dispatch import Future, Mesh
from dovetail.interfaces import Call, PluginContext
from dovetail.workers import WorkerGroup
from dovetail.workers.group import run_on_worker
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.store import RayStore

CALLS = len(PASSES) + 1
HOSTS = 2


class Host:
    """An actor that answers for some of the ranks."""

    def __init__(self) -> None:
        self._engine = StubEngine(StubEngine.Config(name="stub"), PluginContext(role="actor"))
        self._codec = BatchCodec(RayStore())

    def call(self, box: tuple[str, Any]) -> Any:
        """Run a method on a rank's arguments, as its process would."""
        method, payload = box
        return self._codec.encode_result(
            run_on_worker(self._engine, method, self._codec.decode(payload))
        )


class StubRanks(WorkerGroup):
    """A group of any number of ranks, whose calls go to a few actors in turns."""

    def __init__(self, hosts: Sequence[Any], ranks: int) -> None:
        super().__init__(StubEngine, Mesh.over(ranks), role="actor")
        self._hosts, self._codec = hosts, BatchCodec(RayStore())

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        sent = [
            self._hosts[rank % len(self._hosts)].call.remote([method, payload])
            for rank, payload in enumerate(self._codec.encode(calls))
        ]
        return Future(lambda timeout: self._codec.decode_results(ray.get(sent, timeout=timeout)))

    def close(self) -> None:
        """Forget what was put; the actors end with the cluster."""
        self._codec.close()


def measured(
    hosts: Sequence[Any], ranks: int, samples: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Medians of a step over so many ranks, after one that does not count."""
    group = StubRanks(hosts, ranks)
    processor, wall = [], []
    for number in range(args.rounds + 1):
        batch = batch_of(samples, args.tokens)
        began, computed = time.perf_counter(), time.process_time()
        step(group, batch)
        if number:
            wall.append((time.perf_counter() - began) * 1e3)
            processor.append((time.process_time() - computed) * 1e3)
    group.close()
    return {
        "ranks": ranks,
        "samples": samples,
        "tokens": samples * args.tokens,
        "processor_ms": round(statistics.median(processor), 1),
        "wall_ms": round(statistics.median(wall), 1),
        "processor_ms_a_rank_and_call": round(statistics.median(processor) / ranks / CALLS, 3),
    }


def main() -> None:
    """Measure each number of ranks, with a batch that grows with them and with one that does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--a-rank", type=int, default=16, help="samples a rank")
    parser.add_argument(
        "--samples", type=int, default=1024, help="of the batch that stays as it is"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of a sample, half of them its prompt's"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ray.init(
        address="local",  # not a cluster that happens to be there
        num_cpus=HOSTS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 << 30,
        _node_ip_address="127.0.0.1",
    )
    try:
        hosts = [ray.remote(num_cpus=0)(Host).remote() for _ in range(HOSTS)]
        sys.stdout.write(json.dumps({"cores": os.cpu_count(), "ray": ray.__version__}) + "\n")
        for ranks in args.ranks:
            for samples in (args.a_rank * ranks, args.samples):
                found = measured(hosts, ranks, samples, args)
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
