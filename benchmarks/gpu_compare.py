"""Ours and TRL, both with vLLM colocated, in alternation on one accelerator. Prints a line of JSON a run, and the ratio of each round.

    python benchmarks/gpu_compare.py --directory /tmp/compare --rounds 2 [--model 1.5b] [--lean] [key=value …] | tee here.jsonl
    python benchmarks/gpu_compare.py --combine here.jsonl there.jsonl

Further `key=value` are overrides of our config. Both systems are in the environment of this interpreter. `--combine` puts together
what several machines printed: ratios of rounds alone, since seconds of two machines say nothing of each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark of this folder; the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = done.stdout.strip().splitlines()[-1]
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    return json.loads(line)


def combine(files: list[Path]) -> dict[str, Any]:
    """Return the median and the range of the ratios of all rounds, and each machine's median."""
    ratios = {
        file.name: [row["ratio"] for row in map(json.loads, file.open()) if "ratio" in row]
        for file in files
    }
    if empty := [name for name, found in ratios.items() if not found]:
        sys.exit(f"{', '.join(empty)}: no line has a ratio; give what gpu_compare.py printed")
    every = [ratio for found in ratios.values() for ratio in found]
    return {
        "median_ratio": round(statistics.median(every), 3),
        "range": [min(every), max(every)],
        "rounds": len(every),
        "machines": {name: round(statistics.median(found), 3) for name, found in ratios.items()},
    }


def main() -> None:
    """Alternate, and print the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--combine", type=Path, nargs="+", help="files; runs nothing")
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if args.combine:
        sys.stdout.write(json.dumps(combine(args.combine)) + "\n")
        return
    if args.directory is None:
        parser.error("--directory is missing")
    both = ["--directory", str(args.directory), "--model", args.model, "--steps", str(args.steps)]
    for number in range(1, args.rounds + 1):
        ours = run("gpu_step.py", *both, "rollout.name=vllm", *args.overrides)["step_s"]
        their = run("peers/trl_grpo.py", *both, *(["--lean"] if args.lean else []))["step_s"]
        found = {"round": number, "ours_step_s": ours, "trl_step_s": their}
        sys.stdout.write(json.dumps(found | {"ratio": round(their / ours, 3)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
