"""Where the time of one update goes: its phases with and without waiting for the device, then kernels and operators.

    python benchmarks/update_phases.py --run "max_tokens_per_micro_batch=33280 compile=true" --profile-samples 104

Takes the options of `update_speed.py`, and the first `--run` alone. Every phase is shown twice. "host" is how long its call
took while the device worked behind: where these add up to the update, the host is what limits it. "alone" is with the
device idle before and waited for after: where these add up to less than the update, the rest is waiting. Phases that lie
within another, such as the output layer within the forward pass, count in both.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from update_engine import Device, make_engine, settings_of
from update_figures import profile
from update_speed import parse
from update_workload import make_batch, make_model, make_objective

from dovetail.batch import Batch
from dovetail_train_fsdp2 import engine as engine_module, forward as forward_module

Times = dict[str, list[float]]


def timed(name: str, call: Callable[..., Any], times: Times, device: Device | None) -> Any:
    """The call, which notes its seconds; with a device, from idle to idle."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if device is not None:
            device.wait()
        begun = time.perf_counter()
        result = call(*args, **kwargs)
        if device is not None:
            device.wait()
        times[name].append(time.perf_counter() - begun)
        return result

    return run


@contextmanager
def watched(engine: Any, device: Device | None) -> Iterator[Times]:
    """Within it, every phase of `engine.update` notes its seconds."""
    times: Times = defaultdict(list)
    build = engine_module.build_objective

    def build_timed(*args: Any, **kwargs: Any) -> Any:
        goal = build(*args, **kwargs)
        kind = type(goal)
        stack.enter_context(
            patch.object(kind, "term", timed("objective", kind.term, times, device))
        )
        return goal

    runner, optimizer = type(engine._runner), type(engine._made_optimizer())  # noqa: SLF001
    places = [
        (Batch, "take", "take"),
        (engine_module, "lay_out", "lay out"),
        (type(engine), "_cut", "cut"),
        (runner, "__call__", "forward"),
        (forward_module, "score_tokens", "output layer, forward"),
        (type(engine), "_backward", "backward"),
        (optimizer, "step", "optimizer"),
    ]
    with ExitStack() as stack:
        for owner, attribute, name in places:
            call = getattr(owner, attribute)
            stack.enter_context(patch.object(owner, attribute, timed(name, call, times, device)))
        stack.enter_context(patch.object(engine_module, "build_objective", build_timed))
        yield times


def show(title: str, seconds: float, times: Times) -> None:
    """Print the phases of one update."""
    sys.stdout.write(f"# {title}: update {seconds:.3f} s\n")
    for name, each in times.items():
        ordered = sorted(each)
        sys.stdout.write(
            f"# {title} {name:22s} {sum(each) * 1e3:9.1f} ms in {len(each):3d} calls, "
            f"median {ordered[len(each) // 2] * 1e3:8.2f}, most {ordered[-1] * 1e3:8.2f}\n"
        )
    sys.stdout.flush()


def measure(args: argparse.Namespace, model: Path, device: Device) -> None:
    """Print the phases of the first configuration, and its profile over a few samples."""
    batch, objective = make_batch(args), make_objective(args.entropy)
    engine = make_engine(model, settings_of((args.run or [""])[0]), 0, 1, device.name)
    for _ in range(args.warm_up):
        engine.update(batch, objective)
    # A collection in the middle of an update is a pause that belongs to no phase.
    gc.collect()
    begun = time.perf_counter()
    engine.update(batch, objective)
    device.wait()
    show("plain", time.perf_counter() - begun, {})
    for title, waits in (("host", None), ("alone", device)):
        with watched(engine, waits) as times:
            device.wait()
            begun = time.perf_counter()
            engine.update(batch, objective)
            device.wait()
            show(title, time.perf_counter() - begun, times)
    if args.profile_samples:
        few = batch.slice(0, args.profile_samples)
        engine.update(few, objective)
        device.wait()
        profile(engine, few, objective, args, 0)
    engine.close()


def main() -> None:
    """Make the model, and measure."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--profile-samples", type=int, default=0, help="0 for no profile")
    mine, others = own.parse_known_args()
    args = parse(others)
    args.profile_samples = mine.profile_samples
    kind = args.device or (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    device = Device("cpu" if kind == "cpu" else f"{kind}:0")
    with tempfile.TemporaryDirectory() as home:
        make_model(Path(home) / "model", args.model, args.seed)
        measure(args, Path(home) / "model", device)


if __name__ == "__main__":
    main()
