"""Exporting a model in Hugging Face format: rank 0 receives tensors one by one and writes them."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from shutil import copyfile

from dovetail.errors import CheckpointError
from dovetail.interfaces import Tokenizer
from dovetail.sections import ModelSection
from dovetail_torch_engines import Ranks, SafetensorsWriter
from dovetail_train_megatron.names import VALUE_HEAD, TensorTable
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.weights import whole_weights

HEAD = "score."
"""The prefix of the names of tensors in a token classifier's head in transformers."""


def export(
    directory: Path,
    network: Network,
    table: TensorTable,
    section: ModelSection,
    tokenizer: Tokenizer,
    ranks: Ranks,
) -> None:
    """Write a Hugging Face model: config, safetensors in the compute dtype with adapters merged, and the tokenizer unless it is None.
    Collective.

    A critic is written as a token classifier with one label.

    Raises:
        CheckpointError: the files can't be written; raised on every rank.
    """
    with ranks.together():
        if ranks.first:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(directory, error) from error
    writer = SafetensorsWriter(directory, "model")
    for name, tensor in whole_weights(network, table, ranks.rank):
        if ranks.first:
            head = name.startswith(VALUE_HEAD)
            writer.add(HEAD + name.removeprefix(VALUE_HEAD) if head else name, tensor)
    with ranks.together():
        if ranks.first:
            writer.finish_model()
            try:
                _describe(directory, network, section)
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(directory))
            except OSError as error:
                raise _unwritable(directory, error) from error


def _describe(directory: Path, network: Network, section: ModelSection) -> None:
    """Write config.json, and copy generation_config.json of the original model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    from transformers.utils import cached_file

    hf = copy.deepcopy(network.architecture.hf)
    if network.head == "value":
        hf.id2label, hf.label2id = {0: "value"}, {"value": 0}
        hf.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf)].__name__]
    hf.dtype = str(network.architecture.dtype).removeprefix("torch.")
    hf.save_pretrained(str(directory))
    if network.head == "lm":
        # Copied unchanged: transformers refuses to save sampling parameters without `do_sample`, which many models ship.
        with suppress(OSError):
            path, name = str(Path(section.path).expanduser()), "generation_config.json"
            copyfile(cached_file(path, name, revision=section.revision), directory / name)


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the model can't be exported to {directory}: {error}",
        hint="see that there is room on the disk",
    )
