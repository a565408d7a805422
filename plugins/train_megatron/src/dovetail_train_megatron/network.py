"""Network: this rank's shard of a model as Megatron's modules, without loaded weights, and its scoring of tokens.

Legend: T tokens of this rank that are fed to the model, H hidden size, R scored tokens, M scored tokens of the context-parallel
rank with most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.interfaces import OutputSpec, top_size
from dovetail_torch_engines import ScoredShare, Vocabulary, ids_column, sent
from dovetail_train_megatron.architecture import Architecture
from dovetail_train_megatron.attention import PackedAttention, PackRegistry
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.head import score_tokens
from dovetail_train_megatron.needs import imported
from dovetail_train_megatron.packs import PackedMicroBatch
from dovetail_train_megatron.parallel import Parallel

if TYPE_CHECKING:
    from dovetail_train_megatron.adapter import MegatronAdapter

HEADS = {"lm": "a language model's head", "value": "a value head"}


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) for layers without Transformer Engine, with its weight marked for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x, and return the same shape […, D]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Network:
    """One rank's shard of a model, as Megatron's modules.

    Attributes:
        module: Megatron's GPTModel for this stage, whose output is hidden states; on a critic's last stage it has `value_head`.
        device: the device of computation.
        head: the kind of outputs, "lm" for log-probabilities or "value" for a critic's values.
        adapter: the trained adapter; None without one.
    """

    adapter: MegatronAdapter | None = None

    def __init__(
        self,
        architecture: Architecture,
        config: MegatronConfig,
        parallel: Parallel,
        device: torch.device,
        head: Literal["lm", "value"],
    ) -> None:
        self.architecture, self.parallel, self.device, self.head = (
            architecture,
            parallel,
            device,
            head,
        )
        self._chunk = config.logits_chunk
        self._packs = PackRegistry(architecture.frequencies(), architecture.dtype, device)
        self.module = self._made()
        self._sequence_parallel = bool(architecture.transformer.sequence_parallel)
        self.multiple = parallel.cp * (parallel.tp if self._sequence_parallel else 1)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares its weight with the embedding."""
        return self.architecture.tied and self.head == "lm"

    def run(self, module: nn.Module, pack: PackedMicroBatch) -> Tensor:
        """Run this stage on a pack, and return hidden states, float [T, 1, H]; [T / tp, 1, H] with sequence parallelism.

        Args:
            module: the attribute `module`, possibly within Megatron's wrappers.
            pack: the pack, the same on all context-parallel ranks.
        """
        mine = pack.on(self.parallel.cp_rank, self.parallel.cp)
        number = self._packs.add(pack, mine)
        ids = sent(pack.ids_F[mine], self.device)[None] if self.parallel.first_stage else None
        return module(input_ids=ids, position_ids=None, attention_mask=number)

    def scores(
        self, hidden: Tensor, pack: PackedMicroBatch, outputs: Sequence[OutputSpec]
    ) -> dict[str, Tensor]:
        """Compute outputs of a pack's tokens from the last stage's hidden states. Collective over tensor- and context-parallel ranks.

        Returns:
            The outputs by name, with a row for each response token of the micro-batch, [pack.tokens, …], in each output's dtype
            and inner shape; masked tokens hold 0. They are the same on all ranks, and differentiable even if no token is scored.
        """
        parallel = self.parallel
        share = ScoredShare.of(
            pack.source_R, len(pack.ids_F) // parallel.cp, rank=parallel.cp_rank, ranks=parallel.cp
        )
        states_MH = self._whole(hidden).index_select(0, sent(share.source_M, self.device))
        if self.head == "value":
            values: Tensor = self.module.value_head(states_MH.float())[:, 0]
            found = {"values": values}
        else:
            at = ids_column(outputs)
            found = score_tokens(
                states_MH,
                self._output_weight(),
                sent(share.filled(pack.targets_R, 0), self.device),
                sent(share.filled(pack.temperature_R, 1), self.device),
                self._vocabulary(),
                outputs=frozenset(output.name for output in outputs),
                chunk=self._chunk,
                ids_RK=None if at is None else sent(share.filled(pack.read[at], 0), self.device),
                top_k=top_size(outputs),
            )
        return self._aligned(found, pack, share)

    def hidden_shape(self, pack: PackedMicroBatch) -> list[int]:
        """Return the shape of the hidden states that stages exchange: this rank's share of the pack's tokens, 1, and the hidden size."""
        return [len(pack.ids_F) // self.multiple, 1, int(self.architecture.hf.hidden_size)]

    def forget(self) -> None:
        """Drop all packs (packed micro-batches) from the `PackRegistry`, after the passes that used them."""
        self._packs.clear()

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return hidden states [T, H] on every tensor-parallel rank; if the vocabulary is divided, the ranks' gradients are summed."""
        mappings = imported("megatron.core.tensor_parallel.mappings")
        divided = self.head == "lm"
        if self._sequence_parallel:
            gathered: Tensor = mappings.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=divided
            )
            return gathered[:, 0]
        if divided:
            return mappings.copy_to_tensor_model_parallel_region(hidden)[:, 0]
        return hidden[:, 0]

    def _aligned(
        self, found: dict[str, Tensor], pack: PackedMicroBatch, share: ScoredShare
    ) -> dict[str, Tensor]:
        group = self.parallel.cp_group if self.parallel.cp > 1 else None
        token_R = sent(pack.token_R, self.device)
        aligned = {
            name: scores.new_zeros(pack.tokens, *scores.shape[1:]).index_copy(0, token_R, scores)
            for name, scores in share.whole(found, group).items()
        }
        if not len(pack.token_R):
            owed = sum(scores.sum() for scores in found.values() if scores.requires_grad)
            aligned = {n: x + 0 * owed if x.is_floating_point() else x for n, x in aligned.items()}
        return aligned

    def _output_weight(self) -> Tensor:
        return (
            self.module.shared_embedding_or_output_weight()
            if self.tied
            else self.module.output_layer.weight
        )

    def _vocabulary(self) -> Vocabulary:
        own = self.architecture.padded_vocabulary // self.parallel.tp
        first = own * self.parallel.tp_rank
        real = int(self.architecture.hf.vocab_size)
        return Vocabulary(
            first=first,
            size=max(0, min(own, real - first)),
            group=self.parallel.tp_group if self.parallel.tp > 1 else None,
        )

    def _made(self) -> Any:
        architecture, parallel = self.architecture, self.parallel
        hidden_model = _hidden_model()
        module = hidden_model(
            config=architecture.transformer,
            transformer_layer_spec=_layers(architecture),
            vocab_size=architecture.padded_vocabulary,
            max_sequence_length=int(architecture.hf.max_position_embeddings),
            pre_process=parallel.first_stage,
            post_process=parallel.last_stage,
            share_embeddings_and_output_weights=self.tied,
            # `PackedAttention` applies rotary positions itself.
            position_embedding_type="none",
        )
        if self.head == "value" and parallel.last_stage:
            del module.output_layer
            module.value_head = nn.Linear(
                architecture.hf.hidden_size, 1, dtype=torch.float32
            ).requires_grad_(requires_grad=True)
        group = parallel.cp_group if parallel.cp > 1 else None
        for layer in module.modules():
            if isinstance(layer, PackedAttention):
                layer.packs, layer.cp_group = self._packs, group
        return module.to(self.device).train()


def _hidden_model() -> Any:
    base = imported("megatron.core.models.gpt.gpt_model").GPTModel

    class HiddenModel(base):  # type: ignore[misc, valid-type]
        """GPTModel that stops before its output layer."""

        def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
            return hidden_states

    return HiddenModel


def _layers(architecture: Architecture) -> Any:
    """Return Megatron's specs of the stage's layers, with attention over packs."""
    specs = imported("megatron.core.models.gpt.gpt_layer_specs")
    identity = imported("megatron.core.transformer.identity_op").IdentityOp
    block = specs.get_gpt_decoder_block_spec(
        architecture.transformer,
        use_transformer_engine=architecture.uses_transformer_engine,
        normalization="RMSNorm",
    )
    if architecture.transformer.num_moe_experts and not architecture.uses_transformer_engine:
        # The router reads this name, which Megatron defines only if Transformer Engine is installed.
        router = imported("megatron.core.transformer.moe.moe_utils")
        vars(router).setdefault("te_general_gemm", None)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if architecture.uses_transformer_engine:
            continue
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) not in (None, identity):
                setattr(attention, name, Norm)
    if not architecture.uses_transformer_engine:
        block.layer_norm = Norm
    return block
