"""`dovetail eval MODEL…`: figures of models on held-out prompts, with the rewards of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.cli import render
from dovetail.errors import ConfigError

_SHOWN = ("mean@", "acc@", "pass@", "majority@")


@click.command("eval")
@click.argument(
    "arguments", nargs=-1, required=True, metavar="MODEL... [KEY=VALUE]...", type=click.Path()
)
@click.option("--config", type=click.Path(path_type=Path), help="Instead of the run's own config.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Append each model's metrics to this JSONL file.",
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path),
    help="Append every scored response to this JSONL file.",
)
def evaluate(
    arguments: tuple[str, ...],
    config: Path | None,
    as_json: bool,
    out: Path | None,
    samples: Path | None,
) -> None:
    """Evaluate models on held-out prompts, as the validation of a run does.

    MODEL is a run directory (its latest checkpoint), RUN@STEP, RUN@best, RUN@all, a directory in Hugging Face format such as RUN/final,
    or a hub id (ID@REVISION). Several models are a curve: all are evaluated with one config, that of the first one's run or
    --config, on its data.val_files with its rewards. Overrides change it: rollout.validation.n=8, data.val_files=other.parquet.

    pass@k is unbiased (arXiv 2107.03374); an interval holds 95% of the means over prompts drawn anew 1,000 times (bootstrap).
    A checkpoint is first exported to a temporary directory (TMPDIR).
    """
    from dovetail.telemetry import append_rows
    from dovetail_inference.evaluation import evaluate as evaluate_model
    from dovetail_inference.models import find_models
    from dovetail_rollouts import unscored

    names, overrides = _split(arguments)
    sources = find_models(names)
    file = config or next((s.run.config for s in sources[:1] if s.run is not None), None)
    if file is None:
        raise ConfigError(
            f"{sources[0].name} is no checkpoint of a run, so that nothing says which prompts and rewards evaluate it",
            hint="give --config=CONFIG",
        )
    settings = [source.load_config(file, overrides).config for source in sources]
    rows: list[dict[str, Any]] = []
    for source, setting in zip(sources, settings, strict=True):
        began = time.monotonic()
        metrics, found = evaluate_model(setting, source)
        if (problem := unscored(found)) is not None:
            render.warning(f"{source.name}: {problem}")
        seconds = round(time.monotonic() - began, 3)
        row = {"model": source.name, "step": source.step, "seconds": seconds, "metrics": metrics}
        rows.append(row)
        if out is not None:
            append_rows(out, [row])
        if samples is not None:
            append_rows(samples, ({"model": source.name, **sample.row()} for sample in found))
    if as_json:
        render.dump_json(rows)
    else:
        _show(rows)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell models from overrides, which hold a `=` and are no path that exists."""
    models = [
        argument
        for argument in arguments
        if "=" not in argument
        or Path(argument).exists()
        or Path(argument.rpartition("@")[0] or argument).exists()
    ]
    if not models:
        raise click.UsageError("no MODEL is named")
    return models, [argument for argument in arguments if argument not in models]


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line a model and figure over all prompts."""
    figures = list(
        dict.fromkeys(
            name
            for row in rows
            for name in row["metrics"]
            if name.startswith(tuple(f"val/{kind}" for kind in _SHOWN)) and name.count("/") == 1
        )
    )
    table = []
    for row in rows:
        metrics = row["metrics"]
        cells = [row["model"]]
        for name in figures:
            value, low, high = (metrics.get(f"{name}{end}") for end in ("", "/low", "/high"))
            cells.append("" if value is None else f"{value:.4f} [{low:.4f}, {high:.4f}]")
        cells.append(f"{metrics['val/failures']:.0f}")
        table.append(cells)
    render.table(("MODEL", *(name.removeprefix("val/") for name in figures), "FAILURES"), table)
