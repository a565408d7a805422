"""An estimate of the memory that a plan's models take, from the model's shape alone."""

from __future__ import annotations

from typing import Any

from dovetail.config.sections import EngineSection, RunConfig
from dovetail.errors import ModelError
from dovetail.flow.plan import Plan
from dovetail.flow.stages import ModelRole

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimate_memory(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes by purpose on the fullest rank: master weights, gradients, AdamW's moments, rollout weights, KV cache.

    Activations are not counted: they follow `actor.max_tokens_per_micro_batch`.
    """
    model = _model_config(config)
    parameters = _parameters(model)
    memory: dict[str, int] = {}
    for role in plan.models:
        here = -(-parameters // _shards(role))
        memory[f"{role.role} weights"] = here * 4
        if role.trained:
            memory[f"{role.role} gradients"] = here * 4
            memory[f"{role.role} optimizer"] = here * 8
    width = _BYTES[config.model.dtype]
    memory["rollout weights"] = parameters * width
    text = model.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * width
    longest = config.data.max_prompt_length + config.data.max_response_length
    samples = -(-plan.counts.samples_per_step // plan.placement.replicas)
    memory["kv cache, at most"] = per_token * longest * samples
    return memory


def _shards(role: ModelRole) -> int:
    section = role.engine.config
    return section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1


def _model_config(config: RunConfig) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            config.model.path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path {config.model.path!r} holds no model that transformers can read: {error}",
            hint="model.path takes a directory with config.json, or a hub id",
        ) from error


def _parameters(model_config: Any) -> int:
    """Number of parameters, counted on the meta device: no memory is taken."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(p.numel() for p in model.parameters())
