"""ValueModel: a language model's base with one value a token on top; loading and exporting it.

A checkpoint of a reward or classification model with one label brings its head along; any other starts at 0, so that
its value is 0 everywhere until the first update.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.config.sections import ModelSection
from dovetail.errors import ModelError
from dovetail_train_fsdp2.model import load_trunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = ("score", "value_head", "v_head", "v_head.summary", "value_head.summary", "classifier")
"""Where checkpoints keep a head of one label: `score` in transformers, the others in value models of RL libraries."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class ValueModel(nn.Module):
    """V(state) = w · h + b, with h the base's last hidden state, in float32."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = head


def load_value_model(section: ModelSection, device: torch.device, logger: Any) -> ValueModel:
    """Load the base of any Hugging Face causal language model, or of a classifier of its family, and a value head.

    Raises:
        ModelError: the base can't be loaded (see `load_model`), or the checkpoint holds a head that gives
            more than one number.
    """
    trunk = load_trunk(section, device)
    head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=torch.float32)
    stored = _stored_head(section, head.in_features)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(stored[name]) if name in stored else parameter.zero_()
    if not stored:
        logger.info(f"{section.path} holds no value head: the critic starts with a value of 0")
    return ValueModel(trunk, head.to(device)).eval()


def export_value_model(directory: Path, model: ValueModel, weights: dict[str, Tensor]) -> None:
    """Write it as a token classifier of one label, which transformers and `load_value_model` read.

    Where the architecture has no token classifier, the base is written with `value_head.weight` and `.bias` beside.

    Args:
        directory: is made where it does not exist.
        model: gives the config.
        weights: of the base, by its own names, as they are to be written; the head is written in float32.
    """
    skeleton, prefix, name = _classifier(model)
    head = model.value_head.state_dict()
    state = {f"{prefix}{key}": tensor for key, tensor in weights.items()}
    state |= {f"{name}.{key}": tensor for key, tensor in head.items()}
    skeleton.save_pretrained(str(directory), state_dict=state)


def _classifier(model: ValueModel) -> tuple[PreTrainedModel, str, str]:
    """What to save as: an empty model, the prefix of the base's weights in it, and its head's name."""
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(model.trunk.config)
    config.id2label, config.label2id = {0: "value"}, {"value": 0}
    wanted = {f"{name}.{key}" for name in HEADS for key in ("weight", "bias")}
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForTokenClassification.from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError):
        return model.trunk, "", "value_head"
    prefix = f"{skeleton.base_model_prefix}."
    others = {key for key in skeleton.state_dict() if not key.startswith(prefix)}
    names = {key.rpartition(".")[0] for key in others}
    if len(names) == 1 and others <= wanted and len(others) == len(model.value_head.state_dict()):
        return skeleton, prefix, names.pop()
    return model.trunk, "", "value_head"


def _stored_head(section: ModelSection, hidden_size: int) -> dict[str, Tensor]:
    """`weight` and, where there is one, `bias` of the checkpoint's own head; nothing where it has none."""
    files = _files_by_name(section)
    name = next((name for name in HEADS if f"{name}.weight" in files), None)
    if name is None:
        odd = sorted(key for key in files if key.split(".")[0] in {"v_head", "value_head", "score"})
        if odd:
            raise ModelError(
                f"model {section.path!r} holds a value head of another form: {odd[0]!r}",
                hint=f"a critic's head is one linear layer, named {', '.join(HEADS)}",
            )
        return {}
    stored = {
        key: _read(files[f"{name}.{key}"], f"{name}.{key}")
        for key in ("weight", "bias")
        if f"{name}.{key}" in files
    }
    if tuple(stored["weight"].shape) != (1, hidden_size):
        raise ModelError(
            f"the head {name!r} of model {section.path!r} has shape {tuple(stored['weight'].shape)}, "
            f"not (1, {hidden_size})",
            hint="a critic gives one number: name a model with one label, or a plain language model",
        )
    return stored


def _files_by_name(section: ModelSection) -> dict[str, Path]:
    """Every tensor of the checkpoint, and the file that holds it."""
    for index in INDEXED:
        if (file := _file(section, index)) is not None:
            places: dict[str, str] = json.loads(file.read_text())["weight_map"]
            files = {name: _file(section, name) for name in set(places.values())}
            return {key: found for key, name in places.items() if (found := files[name])}
    for name in SINGLE:
        if (file := _file(section, name)) is not None:
            return dict.fromkeys(_names(file), file)
    return {}


def _file(section: ModelSection, name: str) -> Path | None:
    from transformers.utils import cached_file

    path = str(Path(section.path).expanduser())
    try:
        found = cached_file(path, name, revision=section.revision)
    except OSError:
        return None
    return None if found is None else Path(found)


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as tensors:
            return list(tensors.keys())
    return list(_unpickled(file))


def _read(file: Path, name: str) -> Tensor:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as tensors:
            stored: Tensor = tensors.get_tensor(name)
            return stored
    return _unpickled(file)[name]


def _unpickled(file: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    return state
