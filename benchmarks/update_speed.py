"""Times one update of a random-weight Qwen2.5 through the training engine, on any number of ranks of this machine.

    python benchmarks/update_speed.py --run "max_tokens_per_micro_batch=16384" --run "compile=true"
    python benchmarks/update_speed.py --model 1.5b --ranks 4 --lengths skewed --partition arrival
    python benchmarks/update_speed.py --samples 2 --response 65408 --run "max_tokens_per_micro_batch=65536"
    python benchmarks/update_speed.py --model 7b --run 'lora={"rank":32} gradient_checkpointing=true'
    python benchmarks/update_speed.py --ranks 2 --run "engine=megatron tensor_parallel_size=2" --run "engine=fsdp2"
    python benchmarks/update_speed.py --ranks 2 --model 1.5b --samples 256 --layouts --rounds 2 --offload
    python benchmarks/update_speed.py --turns 5 --run "max_tokens_per_micro_batch=16384" --run "compile=true"

Every `--run` is one configuration: `key=value` of the engine's config, of the training section, or of the model
section; `engine=megatron` takes that engine in place of fsdp2. `--layouts` stands for four of them: fsdp2 over all
ranks, and Megatron with all ranks along dp, tp and pp. `--rounds` goes through all of them again, so that what changes
on the machine meanwhile does not fall on one alone. `--offload` moves the engine to the host and back, twice.
`--turns` keeps the engines of all runs and lets each update so often, in turns, which are shorter and closer than rounds:
one rank, no memory figures, and the log-probabilities of every engine before its first update against the first engine's.

Prints one JSON line each: medians over the measured updates, and the settings. Utilisation is model FLOPs over time
and peak: 6·N·T for N parameters (a tied embedding counts once) and T tokens, prompts included; apart from it with
attention, 6·layers·heads·head size·ΣL² more (causal, forward and backward). Recomputation counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from update_engine import Device, make_engine, settings_of
from update_figures import figures, predicted_gib, profile
from update_workload import SIZES, make_batch, make_model, make_objective, parameters_of, shares

SHOWN = ("model", "ranks", "lengths", "samples", "prompt", "response", "partition")
"""Options that every line repeats."""


def layouts(ranks: int, tokens: int) -> list[str]:
    """FSDP2, and Megatron with all ranks along dp, tp and pp: as configurations that `--run` takes.

    A tensor-parallel rank holds but a part of most activations, so it takes as many more tokens at once. Stages wait for
    the first micro-batch and the last, so they take as many fewer.
    """
    fsdp2 = "engine=fsdp2 gradient_checkpointing=false share_prompts=never"
    megatron = "engine=megatron fused_activations=true overlap_gradients=true"
    return [
        f"{fsdp2} max_tokens_per_micro_batch={tokens}",
        f"{megatron} max_tokens_per_micro_batch={tokens}",
        f"{megatron} max_tokens_per_micro_batch={tokens * ranks} tensor_parallel_size={ranks}",
        f"{megatron} max_tokens_per_micro_batch={tokens // ranks} pipeline_parallel_size={ranks}",
    ]


def measure(
    args: argparse.Namespace, model: Path, run: str, rank: int, device: Device
) -> dict[str, Any]:
    """One configuration: its figures, with the slowest rank's seconds and the largest rank's memory."""
    whole, objective = make_batch(args), make_objective(args.entropy)
    device.clear()
    started = time.perf_counter()
    engine = make_engine(model, settings_of(run), rank, args.ranks, device.name)
    start_s = time.perf_counter() - started
    try:
        parameters, mesh = parameters_of(model), engine.context.mesh
        # Ranks that share samples are given the same ones.
        parts = shares(whole, mesh.axis_size("dp"), args.partition)
        mine = parts[mesh.coordinates(rank)["dp"]]
        seconds = []
        for number in range(args.warm_up + args.updates):
            if number == args.warm_up:
                device.clear()
            seconds.append(device.seconds(lambda: engine.update(mine, objective)))
        found = device.largest({**device.peak_gib(), "held_gib": device.held_gib()})
        found |= predicted_gib(args, engine, parameters, settings_of(run))
        if args.offload:
            found |= offloaded(engine, device)
        if args.profile:
            profile(engine, mine, objective, args, rank)
    finally:
        engine.close()
    return {
        **figures(args, seconds[args.warm_up :], parameters, whole, args.ranks),
        **found,
        "first_update_s": round(seconds[0], 1),
        "start_s": round(start_s, 1),
    }


def take_turns(
    args: argparse.Namespace, model: Path, runs: Sequence[str], rank: int, device: Device
) -> bool:
    """Print a line a configuration, of engines that are all there and update in turns after a warm-up; return False: what fails ends it."""
    whole, objective = make_batch(args), make_objective(args.entropy)
    few, parameters = whole.take(np.arange(min(64, len(whole)))), parameters_of(model)

    def seconds(engine: Any) -> float:
        return device.seconds(lambda: engine.update(whole, objective))

    engines, found, took = [], list[dict[str, Any]](), [list[float]() for _ in runs]
    with ExitStack() as closing:
        for run in runs:
            engine = make_engine(model, settings_of(run), rank, 1, device.name)
            closing.callback(engine.close)
            engines.append(engine)
            scores = engine.forward(few, frozenset({"log_probs"}))["log_probs"].values
            found.append({"scores": scores, "first_update_s": round(seconds(engine), 1)})
            device.clear()
        # The first turn fills the allocator's cache, which every engine has cleared.
        for turn in range(args.turns + 1):
            order = list(zip(runs, engines, took, strict=True))
            for run, engine, own in order[:: -1 if turn % 2 else 1]:
                own.append(seconds(engine))
                sys.stderr.write(f"{turn} {run}: {own[-1]:.3f} s\n")
    first = found[0]["scores"]
    for run, own, line in zip(runs, took, found, strict=True):
        gap = np.abs(line.pop("scores") - first)
        line |= {"gap_mean_nats": float(gap.mean()), "gap_max_nats": float(gap.max())}
        line |= {**figures(args, own[1:], parameters, whole, 1), "run": settings_of(run)}
        sys.stdout.write(json.dumps(line) + "\n")
    return False


def offloaded(engine: Any, device: Device) -> dict[str, Any]:
    """Seconds of moving an engine to the host and back, the first time and the second, and what tensors hold before and between."""
    held = device.largest({"held_gib": device.held_gib()})
    away, back = [], []
    for _ in range(2):
        away.append(round(device.seconds(engine.offload), 2))
        held |= device.largest({"held_offloaded_gib": device.held_gib()})
        back.append(round(device.seconds(engine.onload), 2))
    return {"offload_s": away, "onload_s": back, **held}


def work(rank: int, args: argparse.Namespace, model: Path, address: str) -> None:
    """One rank: every configuration, one after the other."""
    import torch

    from dovetail.workers import join_processes, leave_processes

    kind = args.device or (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    device = Device("cpu" if kind == "cpu" else f"{kind}:{rank}")
    if device.accelerated:
        torch.accelerator.set_device_index(rank)
    if args.ranks > 1:
        join_processes(address=address, rank=rank, world=args.ranks, device=device.name)
    if rank == 0:
        make_model(model, args.model, args.seed)
    if args.ranks > 1:
        torch.distributed.barrier()
    runs = list(args.run or [])
    runs += layouts(args.ranks, args.layout_tokens) if args.layouts else []
    measured = take_turns if args.turns else take_rounds
    failed = measured(args, model, runs or [""], rank, device)
    leave_processes()
    if failed:
        raise SystemExit(1)


def take_rounds(
    args: argparse.Namespace, model: Path, runs: Sequence[str], rank: int, device: Device
) -> bool:
    """Print a line a configuration and round; whether one failed."""
    failed = False
    for run in [*runs] * args.rounds:
        line = {name: getattr(args, name) for name in SHOWN}
        try:
            line |= measure(args, model, run, rank, device)
        except Exception as error:
            # With others, who wait in a collective, there is no going on.
            failed = True
            line["error"] = f"{type(error).__name__}: {error}"
            sys.stderr.write(traceback.format_exc())
            if args.ranks > 1:
                raise
        finally:
            if rank == 0:
                sys.stdout.write(json.dumps(line | {"run": settings_of(run)}) + "\n")
                sys.stdout.flush()
        device.clear()
    return failed


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--run", action="append", help="key=value …; may be given many times")
    parser.add_argument("--layouts", action="store_true", help="four runs: see above")
    parser.add_argument("--layout-tokens", type=int, default=16384, help="of a micro-batch in them")
    parser.add_argument("--rounds", type=int, default=1, help="times to go through all runs")
    parser.add_argument("--turns", type=int, default=0, help="updates of each run, in turns")
    parser.add_argument("--lengths", choices=("equal", "skewed"), default="equal")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512, help="tokens; skewed: at most")
    parser.add_argument("--responses-a-prompt", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--entropy", type=float, default=0.0, help="coefficient; 0 asks for none")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--partition", choices=("balanced", "divided", "arrival"), default="balanced"
    )
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of one device")
    parser.add_argument("--offload", action="store_true", help="and time offload and onload")
    parser.add_argument("--profile", action="store_true", help="and print the costliest kernels")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--device", help="cpu, or what torch.accelerator finds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def main() -> None:
    """Start the ranks, and wait for them."""
    args = parse()
    if args.turns and args.ranks > 1:
        raise SystemExit("--turns is for one rank: engines of several would wait for each other")
    with tempfile.TemporaryDirectory() as home:
        model, address = Path(home) / "model", f"file://{home}/join"
        if args.ranks == 1:
            work(0, args, model, address)
            return
        spawning = multiprocessing.get_context("spawn")
        ranks = [
            spawning.Process(target=work, args=(rank, args, model, address))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            time.sleep(0.2)
            if any(process.exitcode for process in ranks):
                # The others wait for the one that failed.
                for process in ranks:
                    process.terminate()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
