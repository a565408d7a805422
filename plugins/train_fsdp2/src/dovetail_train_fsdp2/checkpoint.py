"""Saving, loading and exporting one model: weights as safetensors, moments by torch.save, random state beside.

Nothing is unpickled that could run code: tensors are loaded with `weights_only=True`.
"""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.optim import Optimizer

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.pt", "random.pt"


def save(directory: Path, model: PreTrainedModel, optimizer: Optimizer | None) -> None:
    """Write float32 weights, optimizer and random state below the directory, which is made."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    try:
        save_file(_unique(model), directory / WEIGHTS)
        if optimizer is not None:
            torch.save(optimizer.state(), directory / OPTIMIZER)
        torch.save(_random_state(model.device), directory / RANDOM)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"the training state can't be written to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error


def load(directory: Path, model: PreTrainedModel, optimizer: Optimizer | None) -> None:
    """Restore what `save` wrote.

    Raises:
        CheckpointError: a file is missing or unreadable, or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (WEIGHTS, RANDOM, *([OPTIMIZER] if optimizer else [])):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"checkpoint {directory} has no {name}",
                hint="it is incomplete, or the run that wrote it did not train this model",
            )
    try:
        weights = load_file(directory / WEIGHTS)
        random = torch.load(directory / RANDOM, weights_only=True)
        state = torch.load(directory / OPTIMIZER, weights_only=True) if optimizer else None
    except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {directory} can't be read: {error}") from error
    _load_weights(directory, model, weights)
    if optimizer is not None and state is not None:
        optimizer.load_state(state)
    _set_random_state(model.device, random)


def export(directory: Path, model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write config, safetensors in the compute dtype, and the tokenizer where there is one."""
    narrow = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    try:
        model.save_pretrained(str(directory), state_dict=narrow)
        config = directory / "config.json"
        # transformers writes the dtype of the weights in memory, which are float32.
        described = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(described, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
    except OSError as error:
        raise CheckpointError(
            f"the model can't be exported to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error


def _unique(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor once: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor.detach().contiguous()
    return unique


def _load_weights(directory: Path, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    expected = _unique(model)
    wrong = sorted(expected.keys() ^ weights.keys()) or [
        name for name, tensor in expected.items() if tensor.shape != weights[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: {wrong[0]!r} does not fit",
            hint="resume with the model that the checkpoint was made with",
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_state(device: torch.device, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)
