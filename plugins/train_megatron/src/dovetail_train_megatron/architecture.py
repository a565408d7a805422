"""Architecture: a Hugging Face model's config in Megatron's terms, through mbridge."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.sections import ModelSection
from dovetail_serving import experts_of
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.layouts import check_architecture, check_layout, read_config
from dovetail_train_megatron.needs import has_transformer_engine, imported
from dovetail_train_megatron.parallel import Parallel
from dovetail_train_megatron.stages import last_stage_layers, output_cost


class Architecture:
    """A Hugging Face model's architecture, as Megatron and mbridge describe it.

    Attributes:
        hf: the model's Hugging Face config.
        bridge: mbridge's object for the model, with names and formats but no weights.
        transformer: Megatron's `TransformerConfig` of the layers.
        uses_transformer_engine: whether the layers are Transformer Engine's modules.
        padded_vocabulary: the number of rows of embedding and output layer over all ranks.
    """

    def __init__(
        self,
        section: ModelSection,
        config: MegatronConfig,
        parallel: Parallel,
        head: Literal["lm", "value"] = "lm",
    ) -> None:
        """Read the model's config, and convert it to Megatron's.

        Args:
            section: the config section with the model's path.
            config: the config of the engine.
            parallel: the parallel layout of the ranks.
            head: whether the model computes logits or values.

        Raises:
            ModelError: the config can't be read, or Megatron lacks the architecture.
            ConfigError: the parallel layout does not divide the model, or `layers` requires Transformer Engine, which is not installed.
            PluginNeedsError: megatron-core or mbridge is not installed.
        """
        self.hf = read_config(section)
        self._scores_vocabulary = head == "lm"
        self.dtype: torch.dtype = getattr(torch, section.dtype)
        check_architecture(self.hf, section)
        check_layout(self.hf, config)
        self.tied = bool(getattr(self.hf, "tie_word_embeddings", False))
        if config.layers == "transformer_engine" and not has_transformer_engine():
            raise ConfigError(
                "layers=transformer_engine needs Transformer Engine, which is not installed",
                hint="pip install 'transformer-engine[pytorch]', or set layers=auto",
            )
        plain = config.layers == "local" or config.lora is not None
        self.uses_transformer_engine = not plain and has_transformer_engine()
        self.bridge = self._bridge(config, parallel)
        self.transformer = self.bridge.config
        # With a dtype, mbridge would cast every tensor that it converts.
        self.bridge.dtype = None

    @property
    def padded_vocabulary(self) -> int:
        return int(self.bridge.padded_vocab_size)

    def frequencies(self) -> Tensor:
        """Return the rotary frequencies, float32 [D / 2] with D the head size, as transformers computes them for this model."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = dict(getattr(self.hf, "rope_parameters", None) or {})
        kind = str(parameters.get("rope_type", "default"))
        if kind == "default":
            size, base = self.head_size, float(parameters.get("rope_theta", 10000.0))
            return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](self.hf, torch.device("cpu"))
        return found[0].float()

    @property
    def head_size(self) -> int:
        """The size of one attention head."""
        size = getattr(self.hf, "head_dim", None)
        return int(size or self.hf.hidden_size // self.hf.num_attention_heads)

    def quadratic(self) -> float:
        """Return q in the relative cost n · (1 + q · n) of a sample of n tokens: attention costs q · n², the rest of the model n."""
        hf = self.hf
        heads, layers, hidden = hf.num_attention_heads, hf.num_hidden_layers, hf.hidden_size
        inner = getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size
        active = getattr(hf, "num_experts_per_tok", None) or 1
        attention = 2 * hidden * self.head_size * (heads + hf.num_key_value_heads)
        parameters = layers * (attention + 3 * hidden * inner * active) + hf.vocab_size * hidden
        return float(layers * heads * self.head_size / parameters)

    def _bridge(self, config: MegatronConfig, parallel: Parallel) -> Any:
        bridges = imported("mbridge").AutoBridge
        vocabulary = int(self.hf.vocab_size)
        described = copy.copy(self.hf)
        # If the config has no head_dim, mbridge would use None as the size.
        described.head_dim = self.head_size
        bridge = bridges.from_config(
            described, dtype=self.dtype, make_vocab_size_divisible_by=parallel.tp
        )
        bridge.set_extra_args(**self._settings(config))
        bridge.vocab_size = vocabulary
        bridge.padded_vocab_size = -(-vocabulary // parallel.tp) * parallel.tp
        # mbridge keeps names in the class, where a model with tied weights would change them for all later models.
        direct = {**bridge._DIRECT_MAPPING}  # noqa: SLF001
        direct["output_layer.weight"] = (
            "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        )
        bridge._DIRECT_MAPPING = direct  # noqa: SLF001
        return bridge

    def _settings(self, config: MegatronConfig) -> dict[str, Any]:
        """Return the settings of Megatron's config that the model's config does not give, by name."""
        experts = experts_of(self.hf)
        settings: dict[str, Any] = {
            "sequence_parallel": config.sequence_parallel and config.tensor_parallel_size > 1,
            # Sums, not means: the objective has divided by its denominators.
            "calculate_per_token_loss": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "bias_activation_fusion": config.fused_activations,
            "bias_dropout_fusion": config.fused_activations,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
            "kv_channels": self.head_size,
            # Synchronising the device after every exchange is a workaround for old versions of torch.
            "batch_p2p_sync": False,
        }
        if (stages := config.pipeline_parallel_size) > 1:
            output = output_cost(self.hf, self.head_size) if self._scores_vocabulary else 0.0
            settings["num_layers_in_last_pipeline_stage"] = (
                config.last_stage_layers
                or last_stage_layers(self.hf.num_hidden_layers, stages, output)
            )
        if experts:
            # Routing as in the rollout: no token is dropped, and there is no auxiliary loss.
            settings |= {
                "moe_grouped_gemm": self.uses_transformer_engine,
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_router_dtype": "fp32",
                # Softmax over the chosen experts equals renormalised softmax over all; mbridge's setting is wrong for some models.
                "moe_router_pre_softmax": not getattr(self.hf, "norm_topk_prob", True),
            }
        if config.gradient_checkpointing is True:
            settings |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        elif config.gradient_checkpointing == "selective":
            settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        return settings
