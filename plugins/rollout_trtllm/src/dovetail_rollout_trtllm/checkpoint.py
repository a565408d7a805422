"""Writing a weight update as a checkpoint in Hugging Face format, from which a server can start."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from dovetail.sections import ModelSection

_COPIED = {".json", ".jinja", ".model", ".py", ".txt"}
"""Suffixes of a model's files besides its weights: configs, tokenizer, chat template, code."""


def write_checkpoint(
    directory: Path, model: ModelSection, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a copy of a model's directory with new weights.

    Args:
        directory: a new directory.
        model: the section of the model whose config and other files are copied. They are copied unchanged, since TensorRT-LLM's
            transformers may be older than this environment's and misread its configs.
        tensors: Hugging Face names and tensors of any shape; all tensors are held in host memory until they are written.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.utils import cached_file

    config = cached_file(model.path, "config.json", revision=model.revision)
    directory.mkdir(parents=True)
    for file in Path(str(config)).parent.iterdir():
        if file.suffix in _COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    # Copied, because a receiver may reuse a tensor's memory for the next one.
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    save_torch_state_dict(kept, directory)
