"""The commands to suggest after a run: evaluate, chat, the same run with another seed, or continue."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.checkpoint import CheckpointStore
from dovetail.planning import Plan
from dovetail.telemetry import RunDirectory


def next_commands(plan: Plan, run: RunDirectory, summary: Mapping[str, Any]) -> list[str]:
    """Return the complete terminal commands to suggest after a run, depending on how the run ended."""
    path, store = str(run.path), CheckpointStore(run.checkpoints)
    if summary["status"] == "completed":
        commands = _after_training(plan, run.path, len(store.saved()), summary["model"])
    else:
        saved = store.latest() is not None
        commands = [
            *([("resume", path)] if saved else []),
            ("config", "show", f"{path}/config.yaml"),
        ]
    return [shlex.join((_command(), *command)) for command in commands]


def _after_training(plan: Plan, path: Path, saved: int, model: str | None) -> list[tuple[str, ...]]:
    """Return the commands after a completed run: evaluate its model, chat, and train with another seed to see the effect of chance."""
    config, commands = plan.facts.config, list[tuple[str, ...]]()
    evaluated = f"{path}@all" if saved > 1 else str(path) if saved else model
    if plan.generates and config.data.val_files and evaluated:
        commands.append(("eval", evaluated))
    if model is not None and plan.models[0].head == "lm":
        commands.append(("chat", model))
    # An existing run of this name would be continued or refused.
    seed, name = config.seed + 1, re.sub(r"_seed_\d+$", "", path.name)
    while path.with_name(f"{name}_seed_{seed}").exists():
        seed += 1
    other = f"experiment={name}_seed_{seed}"
    return [*commands, ("train", f"{path}/config.yaml", other, f"seed={seed}")]


def next_stage(plan: Plan, summary: Mapping[str, Any]) -> str | None:
    """Return the docs page on the training that usually follows training on examples; None unless such a run completed with a model."""
    if plan.generates or summary["status"] != "completed" or summary["model"] is None:
        return None
    lm = plan.models[0].head == "lm"
    return "docs/sft.md#grpo-from-there" if lm else "docs/rewards.md#reward-models"


def _command() -> str:
    """Return the command `dovetail` as typed in this shell; its path if the environment is not activated."""
    script = Path(sys.executable).with_name("dovetail")
    found = shutil.which("dovetail")
    if not script.exists() or (found is not None and Path(found).samefile(script)):
        return "dovetail"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
