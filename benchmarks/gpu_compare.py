"""Ours and TRL, both with vLLM colocated, in alternation on one accelerator. Prints a line of JSON a run, and the ratio.

    python benchmarks/gpu_compare.py --directory /tmp/compare --rounds 2 [--model 1.5b] [--lean] [key=value …]

Further `key=value` are overrides of our config. Both systems are in the environment of this interpreter.
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


def main() -> None:
    """Alternate, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    both = ["--directory", str(args.directory), "--model", args.model, "--steps", str(args.steps)]
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(run("gpu_step.py", *both, "rollout.name=vllm", *args.overrides)["step_s"])
        peer = run("peers/trl_grpo.py", *both, *(["--lean"] if args.lean else []))
        theirs.append(peer["step_s"])
    mine, their = statistics.median(ours), statistics.median(theirs)
    summary = {"ours_step_s": mine, "trl_step_s": their, "ratio": round(their / mine, 3)}
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
