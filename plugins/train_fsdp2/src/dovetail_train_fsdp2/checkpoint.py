"""Saving, loading and exporting one model: weights as safetensors, moments by torch.save, random state beside.

With an adapter only what is trained is kept: the frozen base is the model that the run starts from. Nothing is unpickled that could run code: tensors are loaded with `weights_only=True`.
"""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError
from dovetail_train_fsdp2.value_model import ValueModel, export_value_model

if TYPE_CHECKING:
    from dovetail_train_fsdp2.forward import Scorer
    from dovetail_train_fsdp2.optim import Optimizer

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.pt", "random.pt"


def save(directory: Path, scorer: Scorer, optimizer: Optimizer | None) -> None:
    """Write float32 weights, optimizer and random state below the directory, which is made."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in _kept(scorer).items()}
        save_file(contiguous, directory / WEIGHTS)
        if optimizer is not None:
            torch.save(optimizer.state(), directory / OPTIMIZER)
        torch.save(_random_state(scorer.device), directory / RANDOM)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"the training state can't be written to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error


def load(directory: Path, scorer: Scorer, optimizer: Optimizer | None) -> None:
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
    _load_weights(directory, _kept(scorer), weights)
    if optimizer is not None and state is not None:
        optimizer.load_state(state)
    _set_random_state(scorer.device, random)


def export(directory: Path, scorer: Scorer, tokenizer: Any) -> None:
    """Write config, safetensors in the compute dtype with adapters merged, and the tokenizer where there is one."""
    model, narrow = scorer.model, _narrow(scorer)
    try:
        if isinstance(model, ValueModel):
            export_value_model(directory, model, narrow)
        else:
            scorer.trunk.save_pretrained(str(directory), state_dict=narrow)
        config = directory / "config.json"
        # transformers writes the dtype of the weights in memory, which are float32.
        described = json.loads(config.read_text()) | {
            "dtype": str(scorer.dtype).removeprefix("torch.")
        }
        config.write_text(json.dumps(described, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
    except OSError as error:
        raise CheckpointError(
            f"the model can't be exported to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error


def _narrow(scorer: Scorer) -> dict[str, Tensor]:
    """Every tensor of the transformers model by the name that it has without an adapter, merged and in the compute dtype."""
    narrow: dict[str, Tensor] = {}
    for name, tensor in scorer.trunk.state_dict().items():
        base, whole = name, tensor
        if scorer.adapter is not None:
            found = scorer.adapter.base_name(name)
            if found is None:
                continue
            base, whole = found, scorer.adapter.merged(tensor)
        narrow[base] = whole.to(scorer.dtype) if whole.is_floating_point() else whole
    return narrow


def _kept(scorer: Scorer) -> dict[str, Tensor]:
    """Every tensor that a checkpoint keeps, once: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in scorer.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (scorer.adapter is None or tensor.requires_grad):
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def _load_weights(directory: Path, expected: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    wrong = sorted(expected.keys() ^ weights.keys()) or [
        name for name, tensor in expected.items() if tensor.shape != weights[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: {wrong[0]!r} does not fit",
            hint="resume with the model, and the adapter, that the checkpoint was made with",
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
