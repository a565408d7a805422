"""`dovetail export RUN DIRECTORY`: a model of a run's checkpoint, in Hugging Face format."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import click

from dovetail.cli import render


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step.")
@click.option("--best", is_flag=True, help="The best checkpoint, by `trainer.best_metric`.")
@click.option("--role", default="actor", show_default=True, help="Which trained model.")
@click.option("--adapter", is_flag=True, help="The LoRA adapter alone, as peft saves it.")
@click.option(
    "--quantize",
    metavar="METHOD",
    help="Quantize the model as the run's engine knows: fp8, of the engines on PyTorch.",
)
@click.option("--to", type=click.Choice(["disk", "hub"]), default="disk", show_default=True)
def export(
    run: Path,
    directory: str,
    overrides: tuple[str, ...],
    step: int | None,
    best: bool,
    role: str,
    adapter: bool,
    quantize: str | None,
    to: str,
) -> None:
    """Write a checkpoint of RUN to DIRECTORY, which must not exist, as a Hugging Face model with its tokenizer.

    With `--to hub`, DIRECTORY is a repository of the Hugging Face hub, `USER/NAME`, which is created as private if missing.

    RUN may also be a checkpoint of verl's FSDP workers: `global_step_N/actor`, `global_step_N`, or the folder of all steps for the
    latest step. The weights keep the dtype that they were saved in, and no option applies.

    `--quantize fp8` converts the weights of linear layers to float8_e4m3fn with one scale per row, in the compressed-tensors format of
    vLLM and SGLang. Embeddings, norms and the head are unchanged. Requires `pip install 'dovetail-rl[quantize]'`.

    The latest checkpoint is exported unless --step or --best names another. This process exports on the CPU, with one file's tensors in
    memory. Checkpoints of `megatron` have the format of `fsdp2`, which exports without a GPU: set `actor.engine=fsdp2`, or with an adapter
    `actor.engine={name: fsdp2, lora: {rank: 32}}`, with the run's settings.
    """
    from dovetail.checkpoint import CheckpointStore
    from dovetail.errors import CheckpointError
    from dovetail.telemetry import RunDirectory
    from dovetail_inference.export import export_checkpoint, export_foreign
    from dovetail_inference.hub import on_hub

    place = on_hub(directory) if to == "hub" else nullcontext(Path(directory))
    if run.is_dir() and not RunDirectory.begun(run):
        if overrides or step is not None or best or role != "actor" or adapter or quantize:
            raise click.UsageError(
                f"{run} is not a run directory; to export another program's checkpoint, name the checkpoint's own folder and give no options"
            )
        with place as written:
            if export_foreign(run, written):
                render.line(f"{run} → {directory}")
                return
    if adapter and quantize:
        raise click.UsageError(
            "--quantize can't be combined with --adapter: adapters can't be quantized"
        )
    store = CheckpointStore(RunDirectory.open(run).checkpoints)
    if best and step is not None:
        raise click.UsageError("--best and --step can't be combined; give one of them")
    if best:
        marked = store.best()
        if marked is None:
            raise CheckpointError(
                f"{run} has no best checkpoint",
                hint="name a step with --step; for later runs, set trainer.best_metric",
            )
        chosen = marked.path
    else:
        chosen = store.find(step)
    with place as written:
        lines = export_checkpoint(
            RunDirectory.open(run),
            chosen,
            written,
            role,
            overrides,
            adapter=adapter,
            quantize=quantize,
        )
    render.line(f"{chosen.name}, {role} → {directory}")
    for line in lines:
        render.line(re.sub(r"(?<=[ =])DIR(?= |$)", lambda _: shlex.quote(directory), line))
