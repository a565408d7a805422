"""Times checkpoints of a random-weight Qwen2.5 on an accelerator: saving in the step and behind it, resuming, exporting.

    python benchmarks/gpu_checkpoint.py --directory /tmp/gpu_checkpoint --model 0.5b

Prints one JSON line. The disk's own rate is that of one file as large as a checkpoint, written and synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpu_step
import gpu_workload as workload

TRAIN = (sys.executable, "-m", "dovetail.cli.main", "train")
BLOCK = 64 << 20


def rows(run: Path, metric: str) -> list[dict[str, float]]:
    """The rows of the run's metrics that have this one."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if metric in row]


def saving(args: argparse.Namespace, config: Path, *, behind: bool) -> dict[str, list[float]]:
    """Train with a checkpoint after every second step; seconds of steps and saves, in their order."""
    shutil.rmtree(args.directory / "runs", ignore_errors=True)
    options = ["trainer.save_every=2", "trainer.keep_checkpoints=1"]
    subprocess.run(
        [*TRAIN, str(config), *options, f"trainer.async_save={behind}".lower()], check=True
    )
    run = args.directory / "runs" / "gpu" / "step"
    names = ("time/step", "time/checkpoint", "time/checkpoint_blocking")
    return {
        name.removeprefix("time/"): [round(row[name], 2) for row in rows(run, name)]
        for name in names
    }


def disk_rate(directory: Path, size: int) -> float:
    """GB/s of one file of so many bytes, written and synced."""
    block, file = os.urandom(BLOCK), directory / "rate"
    began = time.monotonic()
    with file.open("wb") as out:
        for _ in range(size // BLOCK):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    seconds = time.monotonic() - began
    file.unlink()
    return size / seconds / 1e9


def resumed(train: list[str], run: Path, steps: int) -> float:
    """Seconds from the start of a command that trains one step more than the run's to the start of that step."""
    began = time.time()
    subprocess.run([*train, f"trainer.total_steps={steps + 1}"], check=True)
    last = rows(run, "time/step")[-1]
    return last["time"] - last["time/step"] - began


def exported(directory: Path, run: Path, *options: str) -> dict[str, float]:
    """Seconds and peak anonymous memory of `dovetail export` to `directory/exported`, without mapped files."""
    out = directory / "exported"
    shutil.rmtree(out, ignore_errors=True)
    began, peak = time.monotonic(), 0
    process = subprocess.Popen([*TRAIN[:-1], "export", *options, str(run), str(out)])
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
            peak = max(peak, int(found[0]) if found else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    if code:
        sys.exit(f"export ended with {code}")
    return {
        "export_s": round(time.monotonic() - began, 1),
        "export_peak_anonymous_gib": round(peak / 2**20, 2),
        "exported_gb": round(sum(f.stat().st_size for f in out.iterdir()) / 1e9, 2),
    }


def main() -> None:
    """Make the inputs, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    args.prompts, args.samples, args.prompt_tokens, args.new_tokens = 32, 8, 128, 256
    config = gpu_step.configure(args)
    figures: dict[str, object] = {"model": args.model}
    for name, behind in (("in_the_step", False), ("behind", True)):
        figures[name] = saving(args, config, behind=behind)
        sys.stderr.write(f"{json.dumps(figures)}\n")
    run = args.directory / "runs" / "gpu" / "step"
    latest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    size = sum(file.stat().st_size for file in latest.rglob("*") if file.is_file())
    figures["checkpoint_gb"] = round(size / 1e9, 2)
    figures["disk_gb_per_s"] = round(disk_rate(args.directory, size), 2)
    figures |= exported(args.directory, run)
    figures["resume_to_first_step_s"] = round(resumed([*TRAIN, str(config)], run, args.steps), 1)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
