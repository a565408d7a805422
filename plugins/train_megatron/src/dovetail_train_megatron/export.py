"""A model in Hugging Face form, as rank 0 writes it while the tensors come in one by one."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path

from dovetail.errors import CheckpointError
from dovetail.interfaces import Tokenizer
from dovetail.sections import ModelSection
from dovetail.training import Ranks
from dovetail_train_megatron.names import VALUE_HEAD, TensorTable
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.safetensors_store import SafetensorsWriter
from dovetail_train_megatron.weights import whole_weights

HEAD = "score."
"""A token classifier's head in transformers."""


def export(
    directory: Path,
    network: Network,
    table: TensorTable,
    section: ModelSection,
    tokenizer: Tokenizer,
    ranks: Ranks,
) -> None:
    """Write config, safetensors in the compute dtype with adapters merged, and the tokenizer where there is one. Collective.

    A critic becomes a token classifier of one label.

    Raises:
        CheckpointError: it can't be written; on every rank.
    """
    with ranks.together():
        if ranks.first:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for old in directory.glob("*.safetensors*"):
                    old.unlink()
            except OSError as error:
                raise _unwritable(directory, error) from error
    writer = SafetensorsWriter(directory, "model")
    for name, tensor in whole_weights(network, table, ranks.rank):
        if ranks.first:
            writer.add(_exported_name(name), tensor)
    with ranks.together():
        if ranks.first:
            writer.finish()
            try:
                _index(directory)
                _describe(directory, network, section)
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(directory))
            except OSError as error:
                raise _unwritable(directory, error) from error


def _exported_name(name: str) -> str:
    return HEAD + name.removeprefix(VALUE_HEAD) if name.startswith(VALUE_HEAD) else name


def _index(directory: Path) -> None:
    """Name the files as transformers looks for them."""
    from safetensors import safe_open

    files = sorted(directory.glob("model-*.safetensors"))
    if len(files) == 1:
        files[0].rename(directory / "model.safetensors")
        return
    places, total = {}, 0
    for number, file in enumerate(files, start=1):
        renamed = f"model-{number:05}-of-{len(files):05}.safetensors"
        total += file.stat().st_size
        with safe_open(str(file), framework="pt") as tensors:
            places.update(dict.fromkeys(tensors.keys(), renamed))
        file.rename(directory / renamed)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _describe(directory: Path, network: Network, section: ModelSection) -> None:
    """config.json, and what the model's own directory says about generation."""
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    hf = copy.deepcopy(network.architecture.hf)
    if network.head == "value":
        hf.id2label, hf.label2id = {0: "value"}, {"value": 0}
        hf.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf)].__name__]
    hf.dtype = str(network.architecture.dtype).removeprefix("torch.")
    hf.save_pretrained(str(directory))
    if network.head == "lm":
        with suppress(OSError):
            path = str(Path(section.path).expanduser())
            found = GenerationConfig.from_pretrained(path, revision=section.revision)
            found.save_pretrained(str(directory))


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the model can't be exported to {directory}: {error}",
        hint="see that there is room on the disk",
    )
