"""Export of a trained model from a checkpoint to Hugging Face format, without the run's processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.checkpoint import CheckpointStore, write_whole
from dovetail.config import load_config
from dovetail.errors import CheckpointError, ConfigError, PluginError
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.planning import make_plan
from dovetail.plugins import default_index, load_plugin_class, make_plugin
from dovetail.telemetry import RunDirectory
from dovetail_inference.card import write_card


def export_checkpoint(
    run: RunDirectory,
    checkpoint: Path,
    directory: Path,
    role: str,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    quantize: str | None = None,
) -> Sequence[str]:
    """Write a role's model from a checkpoint, in this process and on the CPU, with its tokenizer and a card.

    Args:
        run: the run directory, whose config names model and engine.
        checkpoint: the checkpoint of the run.
        directory: the directory of the model; must not exist.
        role: the role of the model.
        overrides: `key=value` overrides of the run's config.
        adapter: whether to write only the adapter, in peft's form.
        quantize: the quantization method, such as `fp8`; by default none.

    Returns:
        The commands that serve the model; see `write_card`.

    Raises:
        CheckpointError: the checkpoint is damaged, or the directory exists or can't be written.
        ConfigError: the run trains no such model or adapter, or the package for quantization is not installed.
        ModelError: this kind of model can't be quantized.
    """
    _refuse_existing(directory)
    config = load_config(run.config, overrides).config
    plan = make_plan(config)
    kept = {model.role: model for model in plan.models if model.moves}
    if role not in kept:
        raise ConfigError(
            f"the run does not train the role {role!r}; it trains {', '.join(kept)}",
            hint=f"choose one with --role={next(iter(kept))}",
        )
    CheckpointStore(run.checkpoints).verify(checkpoint)
    model, source = kept[role], plan.facts.plugins["source"]
    context = PluginContext(
        seed=config.seed,
        role=role,
        head=model.head,
        model=config.model_section(role),
        training=model.training,
        tokenizer=source.cls.read_tokenizer(source.config, plan.facts),
    )
    engine: Any = make_plugin(model.engine, context)
    export = engine.export_adapter if adapter else engine.export_saved
    quantized = engine.quantization(quantize) if quantize else None

    def write(place: Path) -> None:
        export(checkpoint / role, place)
        if quantized is not None:
            quantized(place)

    write_whole(directory, write)
    return write_card(run, directory, int(checkpoint.name.removeprefix("step_")), role)


def export_foreign(source: Path, directory: Path) -> bool:
    """Write the model of another program's checkpoint, with the first installed engine that can read the checkpoint.

    Args:
        source: the checkpoint.
        directory: the directory of the model; must not exist.

    Returns:
        Whether an engine wrote the model.

    Raises:
        CheckpointError: the checkpoint is damaged, or the directory exists or can't be written.
    """
    _refuse_existing(directory)
    for entry in default_index().entries("engine"):
        # An engine that can't be loaded here must not prevent another engine from reading the checkpoint.
        with suppress(PluginError):
            ref = PluginRef(kind="engine", name=entry.name, distribution=entry.distribution)
            engine: Any = load_plugin_class(ref)
            if (write := engine.foreign_export(source)) is not None:
                write_whole(directory, write)
                return True
    return False


def _refuse_existing(directory: Path) -> None:
    if directory.exists():
        raise CheckpointError(
            f"{directory} already exists", hint="name a new directory, or remove this one"
        )
