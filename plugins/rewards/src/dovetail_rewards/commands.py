"""`dovetail reward try`: score rows before a run, and see what a reward does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dovetail.sections import RewardSection

_YAML = (".yaml", ".yml")


@click.group()
def reward() -> None:
    """Try rewards outside a run."""


@reward.command("try")
@click.argument("reward_source", metavar="FILE")
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--responses", metavar="FILE", help="Responses to score: a line for each row, in order."
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every sample and the figures.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, such as reward.timeout=5.",
)
@click.option("--prompt-key", default="prompt", show_default=True, help="The column of the prompt.")
def try_reward(
    reward_source: str,
    dataset: str,
    responses: str | None,
    limit: int | None,
    as_json: bool,
    overrides: tuple[str, ...],
    prompt_key: str,
) -> None:
    """Score the rows of DATASET with FILE. Shows scores, errors and times.

    FILE is a Python file with compute_score (my_reward.py, or my_reward.py:other_name), a config (its section reward; it may
    hold no other), the name of an installed reward function, or a dash: the functions that the rows' data_source selects.
    DATASET is a parquet or JSONL file in verl's schema, or samples/step_N.jsonl of a run.

    Without --responses, a row's own response is scored, else the worked solution in extra_info, else the ground truth.
    Exits with 1 where no sample has a score.
    """
    from dovetail.interfaces import Score
    from dovetail.scoring import read_trial, try_rewards
    from dovetail.telemetry import Terminal, visible_json
    from dovetail_rewards.trial_figures import as_json as plain
    from dovetail_rewards.trial_report import show

    section = _section(reward_source, dataset, overrides)
    rows = read_trial(dataset, responses, limit=limit, prompt_key=prompt_key)
    samples = try_rewards(section, rows)
    if as_json:
        click.echo(visible_json(plain(samples)))
    else:
        show(samples, Terminal(highlight=False))
    if not any(isinstance(sample.outcome, Score) for sample in samples):
        click.get_current_context().exit(1)


def _section(source: str, dataset: str, overrides: tuple[str, ...]) -> RewardSection:
    """The reward section that FILE stands for, with the overrides."""
    from dovetail.config import config_from_mapping, load_config

    # Model and data are never looked at: a config is not whole without them.
    placeholders: dict[str, dict[str, Any]] = {
        "model": {"path": "none"},
        "data": {"train_files": [dataset]},
    }
    path, _, attribute = source.partition(":")
    if path.endswith(_YAML):
        added = _absent(placeholders, path, overrides)
        return load_config(path, (*overrides, *added)).config.reward
    if path.endswith(".py") and not Path(path).exists():
        raise _no_such_file(Path(path))
    function: dict[str, Any] | None = {"name": source}
    if source == "-":
        function = None
    elif path.endswith(".py") or Path(path).is_file():
        function = {"path": path, **({"attribute": attribute} if attribute else {})}
    reward_section = {} if function is None else {"function": function}
    mapping = {**placeholders, "reward": reward_section}
    return config_from_mapping(mapping, overrides, name=f"FILE {source}").config.reward


def _absent(
    placeholders: Mapping[str, Mapping[str, Any]], path: str, overrides: tuple[str, ...]
) -> list[str]:
    """The placeholders, as overrides, of keys that neither the config nor an override gives."""
    from dovetail.config import read_file

    tree = read_file(path).tree
    given = {override.partition("=")[0].strip() for override in overrides}
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in placeholders.items()
        for key, value in keys.items()
        if isinstance(tree.get(section, {}), Mapping)
        and key not in tree.get(section, {})
        and not {section, f"{section}.{key}"} & given
    ]


def _no_such_file(file: Path) -> Exception:
    """The error of a Python file that is not there, with the one that was probably meant."""
    from dovetail.errors import ConfigError, nearest

    names = [path.name for path in file.parent.glob("*.py")]
    close = nearest(file.name, names)
    return ConfigError(
        f"FILE {file} does not exist",
        hint=f"did you mean {file.parent / close}?"
        if close
        else "give a Python file with compute_score, a config, the name of an installed reward function, or -",
    )
