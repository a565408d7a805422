"""What to type after a run: evaluate, chat, the next stage, or how to continue."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.run.training_run import TrainingRun


def next_commands(run: TrainingRun, summary: Mapping[str, Any]) -> list[str]:
    """Return commands for the terminal that fit how the run ended."""
    path, dovetail = run.record.directory.path, _command()
    if summary["status"] != "completed":
        saved = run.checkpoints.store.latest() is not None
        commands = [
            *([f"resume {path}"] if saved else []),
            f"config show {path}/config.yaml",
        ]
    else:
        commands = _after_training(run, summary)
    return [f"{dovetail} {command}" for command in commands]


def _after_training(run: TrainingRun, summary: Mapping[str, Any]) -> list[str]:
    """Return what fits a run that is completed: see and try its model, then the next stage or a variant."""
    path, plan, config = run.record.directory.path, run.record.plan, run.record.config
    model, commands = summary["model"], []
    if plan.generates and config.data.val_files:
        commands.append(f"eval {path}@all" if config.trainer.save_every else f"eval {path}")
    if model is not None and plan.models[0].head == "lm":
        commands.append(f"chat {model}")
        if not plan.generates:
            commands.append(
                f"train model.path={model} data.train_files=PROMPTS.parquet reward.function=REWARD.py"
            )
    other = "algorithm.advantage=rloo" if plan.generates else "actor.optim.lr=1e-5"
    return [*commands, f"train {path}/config.yaml experiment=another {other}"]


def _command() -> str:
    """What to type for `dovetail` here: its path, where the environment has not been activated."""
    script = Path(sys.executable).with_name("dovetail")
    found = shutil.which("dovetail")
    if not script.exists() or (found is not None and Path(found).samefile(script)):
        return "dovetail"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
