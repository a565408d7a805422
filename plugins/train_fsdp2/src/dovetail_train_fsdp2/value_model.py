"""ValueModel: a language model's base with a head of one value a token; its loading, and its format in exports.

The head is loaded from the checkpoint of a reward or classification model with one label. With other checkpoints the head starts at
0, so that every value is 0 until the first update.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces import Logger
from dovetail.sections import ModelSection
from dovetail_torch_engines import VALUE_HEADS, StoredCheckpoint, stored_value_head
from dovetail_train_fsdp2.model import base_of, load_trunk
from dovetail_train_fsdp2.shards import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """Value model V(state) = w · h + b, with h the base's last hidden state, in float32."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = head


def load_value_model(section: ModelSection, device: torch.device, logger: Logger) -> ValueModel:
    """Load the base of a Hugging Face causal language model, or of a classifier of the same family, with a value head.

    Raises:
        ModelError: the base can't be loaded (see `load_model`), or the checkpoint's head has more than one output.
    """
    trunk = load_trunk(section, device)
    head = _head(trunk)
    fill_head(head, section, logger)
    return ValueModel(trunk, head.to(device)).eval()


def empty_value_model(model: PreTrainedModel) -> ValueModel:
    """Return a value model over the base of a language model on the meta device.

    Raises:
        ModelError: the base can't be identified.
    """
    trunk = base_of(model)
    with torch.device("meta"):
        return ValueModel(trunk, _head(trunk)).eval()


def fill_head(head: nn.Linear, section: ModelSection, logger: Logger) -> None:
    """Fill a value head with the checkpoint's weights; if the checkpoint has no value head, fill it with 0 and log that.

    Args:
        head: the head's `weight` [1, H] and `bias` [1], possibly sharded.
        section: the config section with the checkpoint's path.
        logger: the logger of the message.

    Raises:
        ModelError: the checkpoint's head has more than one output.
    """
    with StoredCheckpoint(section) as checkpoint:
        stored = stored_value_head(checkpoint, section, head.in_features)
    for name, parameter in head.named_parameters():
        start = stored.get(name, torch.zeros(tuple(parameter.shape)))
        fill(parameter, lambda first, last, start=start: start[first:last])  # type: ignore[misc]
    if not stored:
        logger.info(f"{section.path} holds no value head: the critic starts with a value of 0")


def _head(trunk: PreTrainedModel) -> nn.Linear:
    return nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=torch.float32)


def classifier(model: ValueModel) -> tuple[PreTrainedModel, str, str]:
    """Return the format in which a value model is saved: an empty model, the prefix of the base's weights in it, and the head's name.

    The empty model is a token classifier of one label, which transformers and `load_value_model` read. If the architecture has no
    such class, the base takes its place, with an empty prefix and a head named `value_head`.
    """
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(model.trunk.config)
    config.id2label, config.label2id = {0: "value"}, {"value": 0}
    wanted = {f"{name}.{key}" for name in VALUE_HEADS for key in ("weight", "bias")}
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
