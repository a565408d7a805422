"""From a context to a Scorer: the model of a role, its head, its adapter, and what they may not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.plugin import PluginContext
from dovetail_train_fsdp2.adapter import Adapter, narrow_frozen
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.forward import PolicyScorer, Scorer, ValueScorer
from dovetail_train_fsdp2.model import load_model, use_gradient_checkpointing
from dovetail_train_fsdp2.value_model import load_value_model
from dovetail_train_fsdp2.weights import named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_scorer(config: Fsdp2Config, context: PluginContext) -> Scorer:
    """Load the context's model onto its device. The role `ref` is frozen: it gets no adapter.

    Raises:
        ModelError: it can't be loaded, or can't be trained in its dtype.
        PluginNeedsError, ConfigError: an adapter is asked for, and peft is missing or it does not fit the model.
    """
    section = context.model
    if section is None:
        raise ModelError("the training engine was given no model", hint="set model.path")
    if section.dtype == "float16" and context.role != "ref":
        raise ModelError(
            "model.dtype float16 can't be trained: small gradients vanish without loss scaling",
            hint="use model.dtype=bfloat16",
        )
    device, dtype = torch.device(context.device), getattr(torch, section.dtype)
    scorer: Scorer
    if context.head == "value":
        value_model = load_value_model(section, device, context.logger)
        trunk = value_model.trunk
        scorer = ValueScorer(value_model, dtype, _adapter(trunk, config, context))
    else:
        trunk = load_model(section, device)
        scorer = PolicyScorer(trunk, dtype, _adapter(trunk, config, context))
    if scorer.adapter is not None and dtype != torch.float32:
        narrow_frozen(trunk, dtype)
    if config.gradient_checkpointing:
        use_gradient_checkpointing(trunk)
        # Layers that compute their activations again keep no keys and values.
        scorer.can_share_prompts = False
    return scorer


def _adapter(trunk: PreTrainedModel, config: Fsdp2Config, context: PluginContext) -> Adapter | None:
    if config.lora is None or context.role == "ref":
        return None
    adapter = Adapter(trunk, config.lora, seed=context.seed)
    adapter.check_merges(named_weights(trunk, adapter))
    return adapter
