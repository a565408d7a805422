"""Learning curves of a pretrained model on one accelerator, ours and TRL's: held-out accuracy against samples and seconds.

    python benchmarks/gpu_curves.py --directory /tmp/curves --prepare                   # the data; needs reasoning-gym
    python benchmarks/gpu_curves.py --directory /tmp/curves --model /tmp/smollm2 --limit 480
    python benchmarks/gpu_curves.py --directory /tmp/curves --model /tmp/smollm2 --systems dovetail trl --seeds 1 --tasks word_sums

Two tasks: sums of two numbers in words (`examples/word_sums`), and reasoning-gym's `chain_sum`, two or three numbers below 100.
The systems, on 64 prompts × 8 responses a step, with the settings of `examples/word_sums/config.yaml`: `dovetail`, `trl`
(`peers/trl_learn.py`, in the environment of `--peer-python`), each with its own generation in the trainer's process; `lora`, of rank
32 at ten times the learning rate, and `streaming`, one step ahead: these on the first task and seed alone.

First `dovetail` and `trl` run `--alone` steps each with nothing beside them on their GPU, for their seconds a step; each of several
`--gpus` begins with another of the two. Then `--at-once` runs share a GPU, ours and TRL's of a task and seed on the same one; such a
curve's seconds tell how busy it was as well. Validation is greedy in both and left out of the seconds. `results.jsonl` gets a line
of JSON when a run ends, also where `--limit` ended it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import runpy
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_learn import lines_of, train

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "word_sums"
TASKS = ("word_sums", "chain_sum")
CHAIN_SUM = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
HELD_OUT = 200
OURS: dict[str, list[str]] = {
    "dovetail": [],
    "lora": ["actor.engine.lora={rank: 32}", "actor.optim.lr=2e-4"],
    "streaming": ["trainer.name=streaming", "trainer.max_staleness=1"],
}
"""Systems by what they set besides."""
ENGINE = "actor.engine={name: fsdp2, memory_limit_gib: 16}"
"""Runs that share a GPU leave memory to each other; an update takes 9 GiB."""
LAST = 30.0
"""Seconds before the limit in which no run begins."""


def prepare(directory: Path) -> None:
    """Write `TASK/train.jsonl` and `TASK/val.jsonl` of both tasks; no held-out question is trained on."""
    from reasoning_gym import create_dataset

    runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](directory / "word_sums")
    made = create_dataset("chain_sum", size=6000, seed=1, **CHAIN_SUM)
    answers = {entry["question"]: entry["answer"] for entry in made}
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": answer},
        }
        for question, answer in answers.items()
    ]
    random.Random(1).shuffle(rows)
    folder = directory / "chain_sum"
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"val.jsonl": rows[:HELD_OUT], "train.jsonl": rows[HELD_OUT:]}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))


class Runs:
    """Starts runs and notes what each learned."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.monotonic() + args.limit
        self.lock = threading.Lock()

    def alone(self, number: int, systems: list[str]) -> None:
        """Run each system with nothing beside it on a GPU; each GPU begins with another one."""
        args, first = self.args, number % max(1, len(systems))
        for system in systems[first:] + systems[:first]:
            self.run(
                args.gpus[number], args.tasks[0], system, args.seeds[0], args.alone, alone=True
            )

    def run(self, gpu: str, task: str, system: str, seed: int, steps: int, alone: bool) -> None:
        """Run one system on a task, unless too little time is left."""
        left = self.end - time.monotonic()
        if left < LAST:
            return
        name = f"{task}-{system}-{seed}{f'-alone{gpu}' if alone else ''}"
        home: Path = self.args.directory
        command, found = (self.peer if system == "trl" else self.ours)(
            task, system, name, seed, steps
        )
        began = time.monotonic()
        # Without a GPU named, what the environment shows.
        seen = ["env", f"CUDA_VISIBLE_DEVICES={gpu}"] if gpu else []
        code = train([*seen, *command], home / f"{name}.log", left)
        figures = {
            "task": task,
            "system": system,
            "seed": seed,
            "alone": alone,
            "gpu": gpu,
            "at_once": 1 if alone else self.args.at_once,
            "samples_a_step": 512 if not self.args.tiny else 4,
            "whole_s": round(time.monotonic() - began, 1),
            "rc": code,
        }
        curve = read_peer(found) if system == "trl" else read_ours(found)
        line = json.dumps(figures | curve) + "\n"
        with self.lock, (home / "results.jsonl").open("a") as out:
            out.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    def ours(
        self, task: str, system: str, name: str, seed: int, steps: int
    ) -> tuple[list[str], Path]:
        """Return the command of a run of ours, and its directory."""
        args, home = self.args, self.args.directory
        command = [
            *(sys.executable, "-m", "dovetail.cli.main", "train", str(EXAMPLE / "config.yaml")),
            *("project=curves", f"experiment={name}", f"output_dir={home / 'runs'}"),
            *(f"model.path={args.model}", f"seed={seed}"),
            *(f"data.{part}_files={home / task / part}.jsonl" for part in ("train", "val")),
            *(f"trainer.total_steps={steps}", f"trainer.validate_every={args.validate_every}"),
            *("trainer.save_last=false", "trainer.export=none", "trainer.samples_per_step=0"),
            *("tracking=[jsonl]", "actor.optim.weight_decay=0.0", ENGINE),
            *(("data.train_batch_size=2", "rollout.n=2") if args.tiny else ()),
            *OURS[system],
        ]
        return command, home / "runs" / "curves" / name

    def peer(
        self, task: str, system: str, name: str, seed: int, steps: int
    ) -> tuple[list[str], Path]:
        """Return the command of a run of TRL's, and the file of its curve."""
        args, home = self.args, self.args.directory
        output = home / f"{name}.json"
        command = [
            *(args.peer_python, str(HERE / "peers" / "trl_learn.py"), "--model", str(args.model)),
            *(v for p in ("train", "val") for v in (f"--{p}", str(home / task / f"{p}.jsonl"))),
            *("--output", str(output), "--seed", str(seed), "--steps", str(steps)),
            *("--validate-every", str(args.validate_every)),
            *(("--prompts", "2", "--samples", "2") if args.tiny else ()),
        ]
        return command, output


def read_peer(output: Path) -> dict[str, Any]:
    """What a run of TRL's left; nothing where it ended before its first validation."""
    return json.loads(output.read_text()) if output.exists() else {"curve": [], "steps_s": []}


def read_ours(run: Path) -> dict[str, Any]:
    """The same from the metrics of a run of ours: step, seconds of training until then, accuracy."""
    rows = lines_of(run / "metrics.jsonl")
    steps = {row["step"]: row["time/step"] for row in rows if "time/step" in row}
    until = dict(zip([0, *steps], itertools.accumulate(steps.values(), initial=0.0), strict=True))
    curve = [
        (row["step"], round(until[row["step"]], 2), round(row["val/acc@1"], 4))
        for row in rows
        if "val/acc@1" in row
    ]
    return {"curve": curve, "steps_s": [round(seconds, 3) for seconds in steps.values()]}


def main() -> None:
    """Prepare the data, or run everything and print each result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--model", type=Path, help="a directory, such as smollm2.py writes")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--systems", nargs="+", choices=[*OURS, "trl"], default=["dovetail", "trl", *OURS]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--validate-every", type=int, default=8)
    parser.add_argument("--alone", type=int, default=8, help="steps; 0 leaves this out")
    parser.add_argument("--gpus", nargs="+", default=[""], help="indices; absent: what is visible")
    parser.add_argument("--at-once", type=int, default=8, help="runs that share a GPU")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds in all")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--tiny", action="store_true", help="2 × 2 samples a step, to try it out")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.directory)
        return
    (args.directory / "results.jsonl").unlink(missing_ok=True)
    runs, systems = Runs(args), list(dict.fromkeys(args.systems))
    compared = [system for system in ("dovetail", "trl") if system in systems]
    if args.alone:
        with ThreadPoolExecutor(len(args.gpus)) as pool:
            list(pool.map(lambda turn: runs.alone(turn, compared), range(len(args.gpus))))
    others = [[system] for system in systems if system not in compared]
    first = (args.tasks[0], args.seeds[0])
    # What is compared stays together; tasks and seeds are dealt out to the GPUs.
    jobs = [(*where, compared) for where in itertools.product(args.tasks, args.seeds)]
    jobs += [(*first, other) for other in others]
    pools = [ThreadPoolExecutor(args.at_once) for _ in args.gpus]
    started = [
        pools[turn % len(pools)].submit(
            runs.run, args.gpus[turn % len(pools)], task, system, seed, args.steps, alone=False
        )
        for turn, (task, seed, together) in enumerate(jobs)
        for system in together
    ]
    for run in started:
        run.result()
    for row in lines_of(args.directory / "results.jsonl"):
        if row["steps_s"][2:] and row["curve"]:
            last = {"step_s": statistics.median(row["steps_s"][2:]), "last": row["curve"][-1]}
            shown = {key: row[key] for key in ("task", "system", "seed", "alone", "rc")}
            sys.stdout.write(json.dumps(shown | last) + "\n")


if __name__ == "__main__":
    main()
