"""`dovetail generate MODEL`: responses to prompts, as JSON lines."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli import render


@click.command()
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--prompts", multiple=True, help="A file: Parquet, JSONL, or .txt with a prompt a line."
)
@click.option("--prompt", "texts", multiple=True, help="A prompt, in place of files.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The JSONL file."
)
@click.option("--config", type=click.Path(path_type=Path), help="Instead of the run's own config.")
def generate(
    model: str,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    texts: tuple[str, ...],
    out: Path,
    config: Path | None,
) -> None:
    """Generate responses of MODEL to prompts, and write one line of JSON per prompt, in the order of the prompts.

    MODEL is a run directory (its latest checkpoint), RUN@STEP, RUN@best, a directory in Hugging Face format, or a hub id. Overrides set
    the sampling: rollout.n=4 (1 unless given), rollout.temperature=0.7, rollout.top_p=0.9, data.max_response_length=512, seed=7,
    rollout=vllm; rollout.top_k=1 is greedy. A prompt that is too long is refused unless data.overlong_prompts=filter.

    Under an agent loop (rollout.agent_loop), each response is an episode with a `trajectory`: turns, tool calls, and observations.

    The same command continues an interrupted one. OUT.settings.json keeps the settings.
    A checkpoint is first exported to a temporary directory (TMPDIR).
    """
    from dovetail_inference.generation import generate as generate_rows
    from dovetail_inference.models import find_model

    if bool(prompts) == bool(texts):
        raise click.UsageError("give prompts either by --prompts FILE or by --prompt TEXT")
    source = find_model(model)
    settings = source.load_config(
        config, ["rollout.n=1", "data.overlong_prompts=error", *overrides]
    ).config
    generate_rows(settings, source, out, files=prompts, texts=texts, say=render.line)
