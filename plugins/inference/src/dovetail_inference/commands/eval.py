"""`dovetail eval MODEL…`: metrics of models on held-out prompts, with the rewards of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import render
from dovetail.errors import ConfigError, DovetailError

if TYPE_CHECKING:
    from dovetail_inference.models import ModelSource
    from dovetail_inference.served import ModelServer

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
@click.option(
    "--served",
    metavar="URL",
    help="A server with OpenAI's API that has the model of MODEL, one checkpoint of a run.",
)
@click.option(
    "--served-model", metavar="NAME", help="The server's name of it, where it has several."
)
@click.option("--auth-env", metavar="VARIABLE", help="Environment variable with the server's key.")
def evaluate(
    arguments: tuple[str, ...],
    config: Path | None,
    as_json: bool,
    out: Path | None,
    samples: Path | None,
    served: str | None,
    served_model: str | None,
    auth_env: str | None,
) -> None:
    """Evaluate models on held-out prompts, as the validation of a run does.

    MODEL is a run directory (its latest checkpoint), RUN@STEP, RUN@best, RUN@all, a directory in Hugging Face format such as RUN/final,
    or a hub id (ID@REVISION). Several models give a curve: all models are evaluated with the config of the first model's
    run, or --config, on this config's data.val_files and rewards. Overrides: rollout.validation.n=8, data.val_files=other.parquet.

    pass@k is the unbiased estimate (arXiv 2107.03374). Intervals hold 95% of the means over 1,000 resamples of the prompts (bootstrap).
    A checkpoint is first exported to a temporary directory (TMPDIR).

    With --served, a server such as vLLM or SGLang generates with the exported model. The server's chat template must give as many tokens
    for the first prompts as the run's chat template. Each metric over all prompts must lie in the 95% interval that the run's own
    validation had at the checkpoint's step; otherwise the exit code is 1.
    """
    from dovetail.telemetry import append_rows
    from dovetail_inference.evaluation import evaluate as evaluate_model
    from dovetail_inference.models import find_models
    from dovetail_rollouts import unscored

    names, overrides = _split(arguments)
    sources = find_models(names)
    server = _server(sources, served, served_model, auth_env)
    file = config or next((s.run.config for s in sources[:1] if s.run is not None), None)
    if file is None:
        raise ConfigError(
            f"{sources[0].name} is not a checkpoint of a run, so there is no config for prompts and rewards",
            hint="name a config with --config=CONFIG",
        )
    settings = [source.load_config(file, overrides).config for source in sources]
    rows: list[dict[str, Any]] = []
    for source, setting in zip(sources, settings, strict=True):
        began = time.monotonic()
        metrics, found = evaluate_model(setting, source, server)
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
    if server is not None:
        _check(sources[0], rows[0]["metrics"])


def _server(
    sources: Sequence[ModelSource], url: str | None, model: str | None, auth_env: str | None
) -> ModelServer | None:
    """Return the server that generates; None if the config's engine generates. See `ModelServer.find` for errors."""
    from dovetail_inference.served import ModelServer

    if url is None:
        if model is not None or auth_env is not None:
            raise click.UsageError("--served-model and --auth-env need --served")
        return None
    if len(sources) != 1 or sources[0].step is None:
        raise click.UsageError(
            "--served needs exactly one checkpoint, RUN or RUN@STEP: the server is compared with the run's validation"
        )
    return ModelServer.find(url, model, auth_env)


def _check(source: ModelSource, metrics: Mapping[str, float]) -> None:
    """Compare a server's metrics with the run's.

    Raises:
        ConfigError: see `beside_the_run`.
        DovetailError: a metric is outside of the run's interval.
    """
    from dovetail_inference.served import beside_the_run

    assert source.run is not None
    assert source.step is not None
    figures = beside_the_run(source.run, source.step, metrics)
    outside = [
        f"{each.name} is {each.served:.4f}, outside the interval [{each.low:.4f}, {each.high:.4f}]"
        for each in figures
        if not each.inside
    ]
    if outside:
        raise DovetailError(
            f"the server's metrics differ from the run's validation after step {source.step}: {'; '.join(outside)}",
            hint="check that the server has this checkpoint, in the run's dtype or a quantization that keeps its quality; more prompts "
            "or samples (rollout.validation.n) reduce the noise",
        )
    render.line(f"each metric is in the run's 95% interval after step {source.step}", err=True)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide arguments into models and overrides; an override contains `=` and is not an existing path."""
    models = [
        argument
        for argument in arguments
        if "=" not in argument
        or Path(argument).exists()
        or Path(argument.rpartition("@")[0] or argument).exists()
    ]
    if not models:
        raise click.UsageError("name at least one MODEL")
    return models, [argument for argument in arguments if argument not in models]


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line for each model, and its metrics over all prompts."""
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
