"""Loading a causal language model from a directory or the hub, with errors that say what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dovetail.config.sections import ModelSection
from dovetail.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")


def load_model(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """Load any Hugging Face causal language model: float32 weights, no dropout.

    Raises:
        ModelError: the directory does not exist or lacks config or weights, the hub can't be reached, or the
            model is no causal language model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    _check_directory(section.path)
    model: PreTrainedModel
    try:
        with _no_progress_bar():
            model, found = AutoModelForCausalLM.from_pretrained(
                str(Path(section.path).expanduser()),
                dtype=torch.float32,
                attn_implementation=section.attn_implementation,
                trust_remote_code=section.trust_remote_code,
                revision=section.revision,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, RuntimeError, LookupError, SafetensorError) as error:
        raise ModelError(
            f"model {section.path!r} can't be loaded: {_first_lines(error)}", hint=_hint(section)
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers would go on with random numbers in their place.
        raise ModelError(
            f"model {section.path!r} lacks {len(missing)} weights, such as {missing[0]!r}",
            hint="is it a causal language model, and complete? Fetch or export it again",
        )
    # Dropout is off for good: a policy's log-probabilities must be those that it sampled from.
    return model.to(device).eval()


def use_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass.

    Raises:
        ModelError: the architecture can't.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no gradient checkpointing",
            hint="set actor.engine.gradient_checkpointing=false",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            # The layers checkpoint only while they train. Their children stay in evaluation: no dropout.
            module.training = True


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' progress bar off the terminal, where the run has a display of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_directory(path: str) -> None:
    """Tell a directory from a hub id before transformers does, whose messages speak of the hub alone."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"model directory {path!r} has no config.json",
                hint="model.path must be a directory in Hugging Face format, as save_pretrained writes it",
            )
        if not any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
            raise ModelError(
                f"model directory {path!r} has no weights (model.safetensors)",
                hint="the download may be incomplete: fetch the model again",
            )
    elif directory.is_file():
        raise ModelError(
            f"model.path {path!r} is a file", hint="name the directory that holds config.json"
        )
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(
            f"model directory {path!r} does not exist",
            hint="check model.path; a relative path counts from where the command runs",
        )


def _hint(section: ModelSection) -> str | None:
    if Path(section.path).expanduser().is_dir():
        return None
    return (
        f"there is no directory {section.path!r}, so it was taken for a hub id; "
        "download the model and set model.path to its directory, or check the name and the network"
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
