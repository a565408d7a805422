"""`dovetail reward try`: scores rows before a run, to test a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dovetail.sections import RewardSection


@click.group()
def reward() -> None:
    """Try rewards outside a run."""


@reward.command("try")
@click.argument("reward_source", metavar="FILE")
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--responses", metavar="FILE", help="Responses to score: a line for each row, in order."
)
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of rows to score.")
@click.option("--json", "as_json", is_flag=True, help="Print samples and statistics as JSON.")
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
    """Score the rows of DATASET with the reward function that FILE selects. Shows scores, errors and times.

    FILE is one of: a Python file with compute_score (my_reward.py, or my_reward.py:other_name); a config that has only the section
    `reward`; the name of an installed reward function; or `-`, which scores each row with the function that its data_source selects.
    DATASET is a parquet or JSONL file in verl's schema, or samples/step_N.jsonl of a run.

    Without --responses, the first of these texts that a row has is scored: its response, the worked solution in extra_info, the ground
    truth. Exits with 1 if no sample has a score.
    """
    from dovetail.telemetry import Terminal, visible_json
    from dovetail_rewards.trial_report import report_of, show
    from dovetail_rollouts import try_rewards

    section = _section(reward_source, dataset, overrides)
    trial = report_of(try_rewards(section, dataset, responses, limit=limit, prompt_key=prompt_key))
    if as_json:
        click.echo(visible_json(trial))
    else:
        show(trial, Terminal(highlight=False))
    if all(row["failure"] for row in trial["samples"]):
        click.get_current_context().exit(1)


def _section(source: str, dataset: str, overrides: tuple[str, ...]) -> RewardSection:
    """Return the reward section that the argument FILE selects, with the overrides applied."""
    from dovetail.config import config_from_mapping, load_config, read_file

    # A config must have a model and data, which are not read here.
    placeholders = ["model.path=none", f"data.train_files={json.dumps([dataset])}"]
    path, _, attribute = source.partition(":")
    if path.endswith((".yaml", ".yml")):
        tree = read_file(path).tree
        absent = [key for key in placeholders if not tree.get(key.partition(".")[0])]
        return load_config(path, (*absent, *overrides)).config.reward
    reward: dict[str, Any] = {"function": {"name": source}}
    if source == "-":
        reward = {}
    elif path.endswith(".py") or Path(path).is_file():
        reward = {"function": {"path": path, **({"attribute": attribute} if attribute else {})}}
    given = (*placeholders, *overrides)
    return config_from_mapping({"reward": reward}, given, name=f"FILE {source}").config.reward
