"""Writing a weight update as a checkpoint in Hugging Face format, which a server can be started on."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from dovetail.sections import ModelSection

_COPIED = {".json", ".jinja", ".model", ".py", ".txt"}
"""What belongs to a model beside its weights: configs, tokenizer, chat template, code."""


def write_checkpoint(
    directory: Path, model: ModelSection, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a model's files with other weights.

    Args:
        directory: a new directory.
        model: the model's directory; its config and other files are copied unchanged, since TensorRT-LLM's transformers
            may be older than this one and misread a config that this one writes.
        tensors: the tensors by their Hugging Face names, of any shape; all are held in host memory until they are
            written.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.utils import cached_file

    config = cached_file(model.path, "config.json", revision=model.revision)
    directory.mkdir(parents=True)
    for file in Path(str(config)).parent.iterdir():
        if file.suffix in _COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    # A receiver may use a tensor's memory again for the next one.
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    save_torch_state_dict(kept, directory)
