"""The accelerator memory that an update takes besides weights, gradients and the optimizer's state.

The model runs once on the meta device, where tensors have shapes but no data. The tensors that autograd keeps for the backward pass
are counted. This works for any architecture and any adapter.

Legend: F tokens, H heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.interfaces import PluginContext, UpdateSize, WorkingMemory
from dovetail_torch_engines import CHUNK_BYTES
from dovetail_train_fsdp2.attention import attending_by, register
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.layers import how_of
from dovetail_train_fsdp2.model import described_model
from dovetail_train_fsdp2.packing import WORTHWHILE_PACKED
from dovetail_train_fsdp2.quantised import quantisable
from dovetail_train_fsdp2.recompute import DEAR, How
from dovetail_train_fsdp2.sharding import blocks_of
from dovetail_train_fsdp2.start import empty_runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.forward import ModelRunner

_COUNTED = "dovetail_counted"
_IN_BACKWARD = 1.5
"""Memory of a layer's backward pass, as a multiple of the activations that the layer keeps; measured."""
UNTRACEABLE = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)
"""Exceptions that a model may raise on the meta device, because it reads data as it runs or lacks an argument."""
_TOKENS = 256
"""Number of tokens in the counted pass; memory is proportional to it."""
_MADE = DEAR | {"aten::new_empty"}
"""Operators whose results are expensive to recompute. `aten::new_empty` is included because `_Attention` allocates its results by it."""


@attrs.frozen(kw_only=True)
class TokenBytes:
    """Bytes per token that one decoder layer keeps until its backward pass, for each setting of recomputation."""

    everything: float
    """Bytes per token if the layer keeps every tensor that its backward pass reads."""
    dear: float
    """Bytes per token if the layer keeps its input and the results of matrix products and attention."""
    compiled: float
    """Bytes per token if the layer is compiled. It then keeps its input, the results of matrix products and attention, and those inputs of
    matrix products that are wider than the hidden states."""
    input: float
    """Bytes per token if the layer keeps only its input."""

    def kept(self, how: How, *, compiled: bool) -> float:
        """Return the bytes per token that the layer keeps if the activations named by `how` are recomputed."""
        if how == "everything":
            return self.input
        if how == "cheap":
            return self.dear
        return min(self.compiled, self.everything) if compiled else self.everything


def working_memory(
    config: Fsdp2Config, context: PluginContext, *, ranks: int, size: UpdateSize
) -> WorkingMemory:
    """Estimate the bytes that an update, or a forward pass without training, needs on each rank's accelerator.

    Args:
        config: the config of the engine.
        context: the plugin's context, with model, head, and whether the model is trained.
        ranks: the number of ranks of the engine.
        size: the size of each rank's batch.

    Raises:
        DovetailError: the model can't be built from its config.
        Exception: the model can't run on the meta device, where tensors have no values; the type is one of `UNTRACEABLE`.
    """
    assert context.model is not None
    dtype = getattr(torch, context.model.dtype)
    runner = empty_runner(described_model(context.model), config, context, dtype)
    layers, shards = blocks_of(runner.trunk), config.shards(ranks)
    costs = _counted(runner.trunk, layers, dtype)
    tokens = -(-micro_batch_tokens(config, size) // config.sequence_parallel_size)
    compiled = config.compile
    backward = _IN_BACKWARD * max(cost.kept("nothing", compiled=compiled) for cost in costs)
    head = runner.output_layer if context.head == "lm" else None
    of_head = 0 if head is None else _of_head(head, tokens, dtype, context)
    parts = {
        "weights, gathered": _gathered(runner, layers, config, shards) * dtype.itemsize,
        "activations": 0,
    }
    trained = sum(int(p.numel()) for p in runner.parameters() if p.requires_grad)
    if context.trained and config.reduce_gradients == "once" and shards > 1:
        parts["gradients of other ranks"] = 4 * (trained - trained // shards)
    how = how_of(config, accelerated=True)
    kept = least = 0.0
    if context.trained:
        inputs = sum(cost.input for cost in costs)
        kept = sum(cost.kept(how or "nothing", compiled=compiled) for cost in costs)
        kept = 0.0 if how == "everything" and config.offload_activations else kept
        least = inputs if how is None else kept
    parts["activations"] = round(tokens * kept)
    # Activations peak while the output layer computes. A layer's backward pass exceeds this peak only if it recomputes.
    again = 1 if how == "everything" or not context.trained else 0
    first, last = backward * again, backward * (again or how is None)
    parts["buffers"] = max(of_head, round(tokens * first))
    spare = tokens * (kept - least) + parts["buffers"] - max(of_head, round(tokens * last))
    if context.trained and head is not None and config.keep_logits:
        scored = size.responses * size.response_tokens
        words = len(next(head.parameters())) * dtype.itemsize
        parts["logits"] = round(tokens * scored / (size.prompt_tokens + scored) * words)
        spare += parts["logits"]
    return WorkingMemory(parts=parts, spare=max(0, round(spare)))


def micro_batch_tokens(config: Fsdp2Config, size: UpdateSize) -> int:
    """Return the number of tokens of the largest micro-batch if all prompts and responses have their maximal length.

    Micro-batches hold about equally many units. A unit is a group if the group's prompt is computed once, else the objective's unit:
    a sample, a pair or a group.
    """
    alone = size.prompt_tokens + size.response_tokens
    group = size.prompt_tokens + size.responses * size.response_tokens
    worthwhile = group <= WORTHWHILE_PACKED * size.responses * alone
    shares = config.share_prompts == "always" or (config.share_prompts == "auto" and worthwhile)
    if shares and config.packing != "never" and size.unit == "sample":
        if group > size.budget:
            responses = max(1, (size.budget - size.prompt_tokens) // size.response_tokens)
            return size.prompt_tokens + min(responses, size.responses) * size.response_tokens
        each, count = group, size.prompts
    else:
        together = {"sample": 1, "pair": 2, "group": size.responses}[size.unit]
        each, count = alone * together, size.prompts * size.responses // together
    micro_batches = -(-count // max(1, size.budget // each))
    return -(-count // micro_batches) * each


def _gathered(
    runner: ModelRunner, layers: list[nn.Module], config: Fsdp2Config, shards: int
) -> int:
    """Return the number of parameters that are unsharded on a rank, in the compute dtype, while the rank computes."""
    apart = set()
    if runner.adapter is not None and runner.adapter.section.base is not None:
        # These weights are on every rank in 4 bits, and are dequantised layer by layer.
        apart = {id(layer.weight) for _, layer in quantisable(runner.trunk, runner.output_layer)}

    def size(module: nn.Module) -> int:
        return sum(int(p.numel()) for p in module.parameters() if id(p) not in apart)

    reshards = config.reshard_after_forward
    if shards > 1 if reshards is None else reshards:
        # The root's own weights, and those of two layers: the next layer's are gathered ahead.
        return size(runner) - sum(map(size, layers)) + 2 * max(map(size, layers))
    return size(runner)


def _of_head(head: nn.Module, tokens: int, dtype: torch.dtype, context: PluginContext) -> int:
    """Return the bytes that the output layer takes: a chunk of logits and, if its weight is trained, the weight's gradient."""
    weight = next(head.parameters())
    trained = context.trained and weight.requires_grad
    chunk = min(CHUNK_BYTES, tokens * len(weight) * dtype.itemsize)
    return chunk + int(weight.numel()) * (4 + dtype.itemsize) * trained


def _counted(
    trunk: PreTrainedModel, layers: list[nn.Module], dtype: torch.dtype
) -> list[TokenBytes]:
    """Return the bytes per token that each layer keeps for its backward pass, in the order in which the layers run.

    Moves the trunk to the meta device and runs it there once.
    """
    trunk.to(device="meta", dtype=dtype)
    register(_COUNTED, _attention)
    weights = {_storage(tensor) for tensor in trunk.parameters()}
    count = _Count(trunk.config.get_text_config().hidden_size, weights)
    hooks = [layer.register_forward_pre_hook(count.enter) for layer in layers]
    hooks += [layer.register_forward_hook(count.leave) for layer in layers]
    saving = torch.autograd.graph.saved_tensors_hooks(count.save, lambda kept: kept)
    try:
        with torch.enable_grad(), attending_by(trunk, _COUNTED), count, saving:
            trunk.base_model(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta"),
                position_ids=torch.arange(_TOKENS, device="meta")[None],
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return count.costs


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the memory that the running layer keeps for its backward pass, each storage once.

    Args:
        hidden: the size of the hidden states.
        weights: the storages of the weights, which are not counted.
    """

    def __init__(self, hidden: int, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden, self._weights = hidden, weights
        self._kept: dict[str, dict[int, torch.UntypedStorage]] | None = None
        self.costs: list[TokenBytes] = []

    def enter(self, _: nn.Module, args: Any) -> None:
        """Start to count a layer."""
        self._kept = {"everything": {}, "dear": {}, "compiled": {}}
        self._input = args[0].numel() * args[0].element_size() / _TOKENS

    def leave(self, *_: object) -> None:
        """Record the counts of the layer that has ended."""
        assert self._kept is not None
        sizes = {
            name: sum(storage.nbytes() for storage in kept.values()) / _TOKENS
            for name, kept in self._kept.items()
        }
        self.costs.append(
            TokenBytes(
                everything=max(sizes["everything"], self._input),
                dear=sizes["dear"] + self._input,
                compiled=sizes["compiled"] + self._input,
                input=self._input,
            )
        )
        self._kept = None

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        self._note(tensor, "everything")
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count tensors that are expensive to recompute."""
        result = func(*args, **(kwargs or {}))
        if self._kept is not None and func.name().partition(".")[0] in _MADE:
            self._note(result, "dear", "compiled")
            for given in args:
                if isinstance(given, Tensor) and given.shape[-1] > self._hidden:
                    self._note(given, "compiled")
        return result

    def _note(self, tensor: Tensor, *names: str) -> None:
        if self._kept is None or (key := _storage(tensor)) in self._weights:
            return
        for name in names:
            self._kept[name][key] = tensor.untyped_storage()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - no public name


class _Attention(torch.autograd.Function):
    """Stand-in for attention, with its shapes only: keeps queries, keys, values, results, and a number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query_HFD: Tensor, key_KFD: Tensor, value_KFE: Tensor) -> Tensor:
        heads, tokens, _ = query_HFD.shape
        attended_FHE = query_HFD.new_empty(tokens, heads, value_KFE.shape[-1])
        sums_HF = query_HFD.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_HFD, key_KFD, value_KFE, attended_FHE, sums_HF)
        return attended_FHE

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError


def _attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object
) -> tuple[Tensor, None]:
    return _Attention.apply(query[0], key[0], value[0])[None], None  # type: ignore[no-untyped-call]
