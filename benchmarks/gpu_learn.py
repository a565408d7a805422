"""GRPO learns with each pair of engines: the task of `dovetail demo`, from one warm start, on the accelerator if there is one.

    python benchmarks/gpu_learn.py --directory /tmp/learn hf+fsdp2 vllm+megatron
    python benchmarks/gpu_learn.py --directory /tmp/learn sglang+megatron 'sglang:rollout.engine_args={attention_backend: triton}'
    python benchmarks/gpu_learn.py --directory /tmp/learn --config examples/two_environments/megatron_vllm.yaml vllm+megatron

A pair is a rollout and a training engine. `key=value` overrides the config of every pair, `ENGINE:key=value` of the pairs that
have this engine. Prints a line of JSON a pair, with the accuracy on held-out problems before and after, and exits with 1 if
one failed or did not learn.

Everything is in `--directory` as it comes: PAIR.log, `runs/learn`, and the lines of JSON in `results.jsonl`. A run that takes
longer than `--limit` is ended, and so is the one under way when this program is; where py-spy is installed, PAIR.stacks
says first what its processes were doing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from dovetail_demo import CONFIG
from dovetail_demo.model import HIDDEN_SIZE as DEMO_SIZE

PAIRS = ("hf+fsdp2", "vllm+fsdp2", "sglang+fsdp2", "vllm+megatron", "sglang+megatron")
# Threads that wait sleep instead of spinning, as in the demo; OpenMP reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
HIDDEN_SIZE = 256
"""Features on an accelerator, in four heads of 64: kernels of attention have no smaller ones. A CPU gets the demo's model."""
LEARNED = 0.8
"""Held-out accuracy that a run should pass, as in the demo."""
WINDOW = 5
"""Steps over which the first and the last reward are averaged."""
SHARED = {"gpu_memory_utilization": 0.3, "max_model_len": 128}
"""Of engines that reserve their memory beside the trainer's; the model is tiny."""
FIRST_GRACE, SECOND_GRACE = 20.0, 15.0
"""Seconds that a run may take to end what it is doing, and then to end at once."""
_OVERRIDE = re.compile(r"(?:(?P<engine>[a-z][a-z0-9_]*):)?(?P<text>[a-z_][\w.]*=.*)", re.DOTALL)


def split(arguments: list[str]) -> tuple[list[str], list[tuple[str | None, str]]]:
    """The command's words: pairs, and overrides, each with the engine that it is for."""
    pairs, overrides = [], []
    for word in arguments:
        match = _OVERRIDE.fullmatch(word)
        if match:
            overrides.append((match["engine"], match["text"]))
        elif re.fullmatch(r"[a-z0-9_]+\+[a-z0-9_]+", word):
            pairs.append(word)
        else:
            sys.exit(f"{word!r} is neither ROLLOUT+ENGINE nor [ENGINE:]key=value")
    return pairs or list(PAIRS), overrides


def prepare(directory: Path, seed: int, device: str) -> Path:
    """Data and a warm-started model, made where they are not there yet; the directory of the model."""
    from dovetail_demo.prepare import prepare as prepare_demo

    size = DEMO_SIZE if device == "cpu" else HIDDEN_SIZE
    return prepare_demo(directory, seed, hidden_size=size, device=device)


def write_config(args: argparse.Namespace, pair: str, model: Path, dtype: str) -> Path:
    """The config for a pair of engines, on the model and data of `prepare`; its path."""
    rollout, _, engine = pair.partition("+")
    config: dict[str, Any] = yaml.safe_load((args.config or CONFIG).read_text())
    config |= {"seed": args.seed, "project": "learn", "output_dir": str(args.directory / "runs")}
    config["experiment"] = f"{pair.replace('+', '_')}_{time.strftime('%H%M%S')}"
    config["model"] = {"path": str(model), "dtype": dtype}
    for part in ("train", "val"):
        config["data"][f"{part}_files"] = str(args.directory / "data" / f"{part}.parquet")
    config["rollout"] = {"weight_check": {"every": 10}, **config["rollout"], "name": rollout}
    if args.config is None and rollout in {"vllm", "sglang"}:
        config["rollout"] |= SHARED
    settings = config["actor"]["engine"]
    if not isinstance(settings, dict) or settings.get("name") != engine:
        config["actor"]["engine"] = engine
    # So that few steps are enough: the demo's schedule would spend most of them at small rates.
    config["actor"]["optim"]["schedule"] = "constant"
    config["trainer"] = {"total_steps": args.steps, "save_last": False, "export": "none"}
    config["tracking"] = ["jsonl"]
    path: Path = args.directory / f"{pair}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(command: list[str], log: Path, limit: float) -> int | None:
    """Run a command with its output in a file; its exit status, or None where it took longer than `limit` seconds."""
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    with log.open("w") as out:
        run = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return run.wait(limit)
        except subprocess.TimeoutExpired:
            note_stacks(run.pid, log.with_suffix(".stacks"))
            return None
        finally:
            end(run)


def end(run: subprocess.Popen[bytes]) -> None:
    """End a run as Ctrl-C does, twice if need be: it ends its engines itself. What is left after that is killed."""
    for grace in (FIRST_GRACE, SECOND_GRACE):
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def note_stacks(pid: int, path: Path) -> None:
    """Write down where a process and those below it are, if py-spy is there to tell."""
    spy = shutil.which("py-spy")
    if spy is None:
        return
    with path.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        command = [spy, "dump", "--subprocesses", "--pid", str(pid)]
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=30, check=False)


def figures(run: Path) -> dict[str, Any]:
    """What a run learned: accuracies, mean rewards, the largest difference that the probe found (nats a token).

    Of a run that did not come to its end, what its metrics say so far.
    """
    rows = lines_of(run / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    probed = [
        row["weight_check/mean_difference"] for row in rows if "weight_check/mean_difference" in row
    ]
    found: dict[str, Any] = {
        "reward_first": average(rewards[:WINDOW]),
        "reward_last": average(rewards[-WINDOW:]),
        "probe_mean_difference": max(probed, default=None),
        "steps": sum("time/step" in row for row in rows),
        **{
            f"{name}_s": median([row[f"time/{name}"] for row in rows if f"time/{name}" in row])
            for name in ("step", "rollout", "update_actor", "weight_sync")
        },
    }
    if not (run / "summary.json").exists():
        return found
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is None or after is None:
        return found
    accuracies = {"accuracy_before": round(before, 4), "accuracy_after": round(after, 4)}
    return {"learned": bool(after >= LEARNED and after > before), **accuracies, **found}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file that may still be written, or may not be there yet."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def average(values: list[float]) -> float | None:
    """Their mean; None where there are none."""
    return round(statistics.mean(values), 4) if values else None


def median(values: list[float]) -> float | None:
    """Their median; None where there are none."""
    return round(statistics.median(values), 3) if values else None


def learn(
    args: argparse.Namespace,
    pair: str,
    overrides: list[tuple[str | None, str]],
    model: Path,
    dtype: str,
) -> dict[str, Any]:
    """Train with one pair of engines; the line to print."""
    config = write_config(args, pair, model, dtype)
    mine = [text for engine, text in overrides if engine in {None, *pair.split("+")}]
    log: Path = args.directory / f"{pair}.log"
    began = time.perf_counter()
    command = [sys.executable, "-m", "dovetail.cli.main", "train", str(config), *mine]
    status = train(command, log, args.limit)
    result: dict[str, Any] = {"pair": pair, "overrides": " ".join(mine), "learned": False}
    experiment = yaml.safe_load(config.read_text())["experiment"]
    result |= figures(args.directory / "runs" / "learn" / experiment)
    if status != 0:
        result["learned"] = False
        ended = f"took longer than {args.limit:g} s" if status is None else f"exit status {status}"
        result["error"] = f"{ended}; {log} ends with: {log.read_text()[-1500:]}"
    return result | {"whole_command_s": round(time.perf_counter() - began, 1)}


def main() -> int:
    """Run every pair; the exit status is 0 where all of them learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="for model, data and runs")
    parser.add_argument(
        "--config",
        type=Path,
        help="in place of the demo's; its model, data and trainer are replaced",
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and training")
    parser.add_argument("--dtype", help="computing dtype; absent: bfloat16, and on a CPU float32")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that a run may take")
    parser.add_argument("words", nargs="*", metavar="PAIR | [ENGINE:]KEY=VALUE")
    args = parser.parse_intermixed_args()
    pairs, overrides = split(args.words)
    args.directory = args.directory.resolve()
    args.directory.mkdir(parents=True, exist_ok=True)

    # Whoever ends this program with SIGTERM ends the run that is under way too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    import torch

    there = torch.accelerator.is_available()
    device = str(torch.accelerator.current_accelerator()) if there else "cpu"
    model = prepare(args.directory, args.seed, device)
    dtype = args.dtype or ("bfloat16" if there else "float32")
    learned = []
    for pair in pairs:
        result = learn(args, pair, overrides, model, dtype)
        line = json.dumps(result) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        with (args.directory / "results.jsonl").open("a") as out:
            out.write(line)
        learned.append(result["learned"])
    return 0 if all(learned) else 1


if __name__ == "__main__":
    raise SystemExit(main())
