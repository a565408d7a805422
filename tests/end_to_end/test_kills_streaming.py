"""A run of `streaming` that is killed anywhere goes on with the same command: no prompt is lost or used twice, and no sample is too old."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import killed_at_random

from dovetail.data.ledger import Ledger

STALENESS, EPOCHS, BATCH = 2, 5, 4
STEPS = 3 * EPOCHS
TRAINER = f"{{name: streaming, max_staleness: {STALENESS}, on_sync: abort, total_epochs: {EPOCHS}, save_every: 1, validate_before: false}}"

LOOP = '''
import asyncio

from dovetail.interfaces import AgentLoop
from dovetail.sections import EpisodeSection


class Turns(AgentLoop):
    """Four turns, each followed by what a tool shows after a while."""

    name = "turns"
    api = ">=1.0,<2"
    Config = EpisodeSection

    async def run(self, session):
        for number in range(4):
            await session.generate(max_new_tokens=9)
            await asyncio.sleep(0.02)
            await session.observe(f" ({number}) ")
'''


def prompts_of_steps(run: Path) -> list[Counter[tuple[int, int]]]:
    """Of each step in order, how many samples of each (epoch, prompt) it was trained on."""
    steps = []
    for number in range(1, STEPS + 1):
        lines = (run / "samples" / f"step_{number}.jsonl").read_text().splitlines()
        found = (
            re.match(r"train\.e(\d+)\.p(\d+)\.", json.loads(row)["sample_id"]) for row in lines
        )
        steps.append(Counter((int(match[1]), int(match[2])) for match in found if match))
    return steps


def check_finished(run: Path, expected: list[Counter[tuple[int, int]]]) -> None:
    """A finished run used the prompts in the order of the data, and its samples were young enough."""
    assert prompts_of_steps(run) == expected
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ages = {row["step"]: row["rollout/staleness_max"] for row in rows if "time/step" in row}
    assert sorted(ages) == list(range(1, STEPS + 1))
    assert max(ages.values()) <= STALENESS
    state = json.loads((run / "checkpoints" / f"step_{STEPS}" / "state.json").read_text())
    ledger = Ledger()
    ledger.load_state(state["ledger"])
    ledger.check()
    assert ledger.counts()["used"] == STEPS * BATCH
    assert ledger.counts()["dropped"] == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("samples", ["responses", "episodes"])
def test_a_streaming_run_killed_at_random_instants_uses_every_prompt_once(
    start: Callable[..., Any],
    config: Path,
    samples: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Runs are killed and started again until they are finished, and as many of them as it takes for so many kills.

    `DOVETAIL_KILLS=100` kills as often; without it, 6 times.
    """
    wanted = int(os.environ.get("DOVETAIL_KILLS", "6"))
    settings = (f"trainer={TRAINER}", "data.val_files=[]", "trainer.samples_per_step=-1")
    command = ("train", str(config), *settings, "tracking=[jsonl]", "data.max_response_length=40")
    if samples == "episodes":
        (config.parent / "turns.py").write_text(LOOP)
        loop = {"path": str(config.parent / "turns.py"), "attribute": "Turns"}
        command += (f"rollout.agent_loop={json.dumps(loop)}",)
    directory = config.parent / "runs" / "tests"
    began = time.monotonic()
    done = start(*command, "experiment=undisturbed").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = time.monotonic() - began
    expected = prompts_of_steps(directory / "undisturbed")
    assert sum(expected, Counter()) == {
        (epoch, prompt): 4 for epoch in range(EPOCHS) for prompt in range(12)
    }
    check_finished(directory / "undisturbed", expected)
    names = []
    for name in killed_at_random(start, command, kills=wanted, seconds=seconds):
        check_finished(directory / name, expected)
        names.append(name)
    record_property("runs", len(names))
