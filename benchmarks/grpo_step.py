"""How long a GRPO step takes: ours and TRL's on the fixed workload, in alternation, in one run.

    python benchmarks/grpo_step.py --peer-python .venv-trl/bin/python

Both get the same threads, the same allocator settings and the same work (`workload.py`). A step's seconds run from
the end of the step before it to its own end, so that nothing between steps is left out. Judge by the
medians, or by the fastest steps where the machine is not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import workload
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ALLOCATORS = {
    "inherited": {},
    # Memory stays with the process, and large blocks come from the heap: no page faults anew in every step.
    "retaining": {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
    },
}
"""Settings of glibc's allocator, by name."""


@dataclass
class Timing:
    """Seconds of every measured step of one system, over all its runs."""

    system: str
    steps: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median(self.steps)

    @property
    def fastest(self) -> float:
        return min(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens of a step over its median seconds."""
        return workload.TOKENS_PER_STEP / self.median


def make_assets(directory: Path, seed: int) -> dict[str, Any]:
    """Write model, tokenizer and prompts below a directory, and return the config that trains on them."""
    from dovetail_sdk.testing.tiny import tiny_model

    tokenizer = workload.word_tokenizer()
    # Beside a Qwen2 model, transformers would take it for Qwen2's own tokenizer.
    tokenizer.save_pretrained(str(directory / "tokenizer"))
    sizes = workload.MODEL
    tiny_model(
        directory / "model",
        tokenizer,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        tie_word_embeddings=sizes["tie_word_embeddings"],
        seed=seed,
    )
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in workload.prompts(seed)]
    (directory / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    return {
        "seed": seed,
        "project": "benchmarks",
        "output_dir": str(directory / "runs"),
        "model": {
            "path": str(directory / "model"),
            "tokenizer_path": str(directory / "tokenizer"),
            "dtype": "float32",
        },
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "train_batch_size": workload.PROMPTS,
            "max_prompt_length": workload.PROMPT_TOKENS,
            "max_response_length": workload.NEW_TOKENS,
            "plain_prompts": "raw",
        },
        "rollout": {"n": workload.RESPONSES, "temperature": 1.0, "ignore_eos": True},
        # TRL's optimizer decays nothing by default.
        "actor": {"optim": {"lr": workload.LEARNING_RATE, "weight_decay": 0.0}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(HERE / "workload.py"), "attribute": "compute_score"}},
        "trainer": {
            "total_steps": workload.STEPS,
            "validate_before": False,
            "validate_after": False,
        },
        "tracking": ["jsonl"],
    }


def run_ours(
    config: Path, output_dir: Path, round_: int, timing: Timing, env: Mapping[str, str]
) -> None:
    """Train once through the command line and add its steps."""
    experiment = f"round_{round_}"
    command = [
        sys.executable,
        "-m",
        "dovetail.cli.main",
        "train",
        str(config),
        f"experiment={experiment}",
    ]
    run_command(command, env)
    text = (output_dir / "benchmarks" / experiment / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if "time/step" in row]
    lengths = {row[f"response_length/{bound}"] for row in rows for bound in ("mean", "max")}
    if len(rows) != workload.STEPS or lengths != {workload.NEW_TOKENS}:
        sys.exit(
            f"our run did other work than the workload states: {len(rows)} steps with responses of "
            f"{sorted(lengths)} tokens, where {workload.STEPS} of {workload.NEW_TOKENS} were due"
        )
    ends = [row["time"] for row in rows]
    seconds = [end - start for start, end in pairwise(ends)]
    timing.steps += seconds[workload.WARM_UP_STEPS - 1 :]
    for row in rows[workload.WARM_UP_STEPS :]:
        for name, value in row.items():
            if name.startswith("time/"):
                timing.phases.setdefault(name.removeprefix("time/"), []).append(value)


def run_peer(python: str, seed: int, threads: int, timing: Timing, env: Mapping[str, str]) -> None:
    """Run TRL once and add its steps."""
    command = [python, str(HERE / "peers" / "trl_cpu.py"), f"--seed={seed}", f"--threads={threads}"]
    output = run_command(command, env)
    result = json.loads(output.strip().splitlines()[-1])
    timing.system = f"{result['system']}, torch {result['versions']['torch']}"
    timing.steps += result["step_seconds"][workload.WARM_UP_STEPS :]


def run_command(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The command's standard output; ends the benchmark with the command's last words where it fails."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def show(ours: Timing, peer: Timing | None, threads: int, allocator: str) -> None:
    """Print the table of both systems, the ratio, and our phases."""
    console = Console(highlight=False)
    table = Table(
        title=f"A GRPO step, {threads} threads, allocator {allocator}", title_justify="left"
    )
    for column in ("system", "median s", "fastest s", "tokens/s", "steps"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for timing in (peer, ours):
        if timing is not None:
            table.add_row(
                timing.system,
                f"{timing.median:.3f}",
                f"{timing.fastest:.3f}",
                f"{timing.tokens_per_second:,.0f}",
                str(len(timing.steps)),
            )
    console.print(table)
    if peer is not None:
        console.print(
            f"ours is {peer.median / ours.median:.2f} times as fast by the medians, "
            f"{peer.fastest / ours.fastest:.2f} times by the fastest steps"
        )
    phases = Table(title="Our phases, medians", title_justify="left")
    phases.add_column("phase")
    phases.add_column("s", justify="right")
    for phase, seconds in sorted(ours.phases.items(), key=lambda item: -median(item[1])):
        phases.add_row(phase, f"{median(seconds):.4f}")
    console.print(phases)


def as_json(timing: Timing | None) -> dict[str, Any] | None:
    """A timing for `--json`."""
    if timing is None:
        return None
    return {
        "system": timing.system,
        "median_seconds": timing.median,
        "fastest_seconds": timing.fastest,
        "tokens_per_second": timing.tokens_per_second,
        "steps": timing.steps,
        "phases": {name: median(seconds) for name, seconds in timing.phases.items()},
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", help="Python of the environment that has TRL; without it only ours runs"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system, in alternation")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each")
    parser.add_argument("--allocator", choices=list(ALLOCATORS), default="inherited")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Run both systems in alternation and compare."""
    options = arguments()
    env = {
        **os.environ,
        **ALLOCATORS[options.allocator],
        "OMP_NUM_THREADS": str(options.threads),
        "MKL_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
    }
    ours = Timing("dovetail")
    peer = Timing("trl") if options.peer_python else None
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = directory / "config.yaml"
        settings = make_assets(directory, options.seed)
        config.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
        for round_ in range(options.rounds):
            turns = [lambda n=round_: run_ours(config, directory / "runs", n, ours, env)]
            if peer is not None:
                turns.append(
                    lambda: run_peer(options.peer_python, options.seed, options.threads, peer, env)
                )
            # Whoever goes first in one round goes second in the next: drift falls on both alike.
            for turn in turns if round_ % 2 else reversed(turns):
                turn()
    show(ours, peer, options.threads, options.allocator)
    if options.json:
        figures = {"ours": as_json(ours), "peer": as_json(peer), "threads": options.threads}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
