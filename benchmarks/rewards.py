"""How many answers a second the reward managers score: `naive`, `parallel` and a plain loop, on the same rule.

    python benchmarks/rewards.py                       # 4,096 answers, a CPU-heavy rule
    python benchmarks/rewards.py --rule gsm8k          # a rule of microseconds: what a manager itself costs
    python benchmarks/rewards.py --rule math_verify    # math-verify, called directly (it must be installed);
                                                       # under `naive` every answer fails, since it refuses threads
    python benchmarks/rewards.py --run runs/p/e        # of a run: how much of its scoring generation has hidden

Systems take turns, and the fastest of several rounds counts: other work on the machine only adds. Starting the workers is timed
apart, since a run does it once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.interfaces import Failure, PluginContext, RewardManager, Sample
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.manager_config import NaiveConfig, ParallelConfig
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rewards.managers.parallel import ParallelManager, cores
from dovetail_rollouts import RewardFunctions, Scorer, configured_functions
from dovetail_sdk.testing import make_sample

RULES = {
    "heavy": '''
from difflib import SequenceMatcher

def compute_score(solution_str, ground_truth):
    """About a millisecond of pure Python."""
    return SequenceMatcher(None, solution_str * 2, ground_truth * 40, autojunk=False).ratio()
''',
    "gsm8k": """
import re

def compute_score(solution_str, ground_truth):
    found = re.findall(r"####\\s*(-?[0-9.,]+)", solution_str)
    return float(bool(found) and found[-1] == ground_truth)
""",
    "math_verify": """
from math_verify import parse, verify

def compute_score(solution_str, ground_truth):
    return float(verify(parse(f"${ground_truth}$"), parse(solution_str)))
""",
}
"""Rules by name, as a user's reward file has them."""


def samples(count: int, seed: int) -> list[Sample]:
    """Answers of a paragraph with a boxed fraction and a number after `####`; half of them right."""
    generator = random.Random(seed)
    made = []
    for number in range(count):
        top, bottom = generator.randint(1, 99), generator.randint(2, 99)
        given = top if generator.random() < 0.5 else top + 1
        words = " ".join(
            generator.choice(("so", "then", "hence", "add", "carry")) for _ in range(30)
        )
        truth = f"\\frac{{{top}}}{{{bottom}}}"
        text = f"{words} \\boxed{{\\frac{{{given}}}{{{bottom}}}}}\n#### {given}"
        made.append(make_sample(str(number), text, ground_truth=truth))
    return made


def through(manager: RewardManager, rows: Sequence[Sample]) -> tuple[float, int]:
    """Seconds that a started manager takes for all rows, through the Scorer; and how many failed."""

    async def main() -> tuple[float, int]:
        scorer = Scorer(manager, timeout=60.0)
        began = time.perf_counter()
        for row in rows:
            scorer.add(row, group=row.sample_id, group_size=1)
        outcomes = await scorer.finish()
        seconds = time.perf_counter() - began
        return seconds, sum(isinstance(outcome, Failure) for outcome in outcomes.values())

    return asyncio.run(main())


def plain_loop(functions: RewardFunctions, rows: Sequence[Sample]) -> tuple[float, int]:
    """Seconds of calling the function for one row after the other."""
    call = functions.function_for(None)
    began = time.perf_counter()
    for row in rows:
        call(row)
    return time.perf_counter() - began, 0


def hidden(run: Path) -> dict[str, float]:
    """Seconds in which a run's samples were scored, those of them after generation had ended, and the share of the others."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scoring = [s["time/rollout/scoring"] for s in steps if "time/rollout/scoring" in s]
    left = [s["time/rollout/scoring_left"] for s in steps if "time/rollout/scoring_left" in s]
    return {
        "steps": len(scoring),
        "scoring_s": sum(scoring),
        "left_s": sum(left),
        "hidden_share": 1.0 - sum(left) / sum(scoring),
    }


def main() -> None:
    """Time the three, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=sorted(RULES), default="heavy")
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--run", type=Path, help="directory of a run; nothing else is measured")
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(hidden(args.run)))
        return
    rows = samples(args.answers, seed=1)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rule.py"
        file.write_text(RULES[args.rule])
        section = RewardSection(function=PluginSection(path=str(file)))
        functions = configured_functions(section, PluginContext())
        context = PluginContext(reward_functions=functions)
        naive = NaiveManager(NaiveConfig(), context)
        parallel = ParallelManager(ParallelConfig(workers=args.workers), context)
        naive.start()
        began = time.perf_counter()
        parallel.start()
        start = time.perf_counter() - began
        systems: dict[str, Callable[[], tuple[float, int]]] = {
            "plain loop": lambda: plain_loop(functions, rows),
            "naive": lambda: through(naive, rows),
            "parallel": lambda: through(parallel, rows),
        }
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        failures: dict[str, int] = {}
        own: dict[str, float] = {}
        try:
            for _ in range(args.rounds):
                for name, run in systems.items():
                    cpu = time.process_time()
                    taken, failures[name] = run()
                    seconds[name].append(taken)
                    own[name] = min(own.get(name, math.inf), time.process_time() - cpu)
        finally:
            naive.close()
            parallel.close()
    report(args, seconds, own, failures, start)


def report(
    args: Any,
    seconds: dict[str, list[float]],
    own: dict[str, float],
    failures: dict[str, int],
    start: float,
) -> None:
    """A table for people, and a line of JSON."""
    # own CPU: of this process, an answer; it is what scoring takes from generation in the same process
    table = Table(title=f"{args.answers:,} answers, rule {args.rule!r}, {args.workers} workers")
    for column in ("system", "answers/s", "µs/answer", "own CPU", "failed", "spread"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, times in seconds.items():
        best = min(times)
        table.add_row(
            name,
            f"{args.answers / best:,.0f}",
            f"{best / args.answers * 1e6:,.0f}",
            f"{own[name] / args.answers * 1e6:,.0f} µs",
            f"{failures[name]:,}",
            f"{min(times):.2f} to {max(times):.2f} s",
        )
    console = Console()
    console.print(table)
    console.print(f"starting {args.workers} workers: {start:.2f} s; load {os.getloadavg()[0]:.1f}")
    figures = {name: args.answers / min(times) for name, times in seconds.items()}
    print(
        json.dumps(
            {"rule": args.rule, "answers_per_second": figures, "failed": failures, "start_s": start}
        )
    )


if __name__ == "__main__":
    main()
