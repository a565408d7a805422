"""Recompute: which decoder layers keep their activations for the backward pass, and which recompute them.

A layer's `forward` is replaced, so that hooks on the layer, such as fully_shard's, run outside it: weights are gathered before the
layer is recomputed. Under `auto` the free memory is read for every micro-batch. Layers nearest to the output keep their activations
first, because the backward pass frees these first.

Legend: B rows, L padded length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dovetail_train_fsdp2.memory import MemoryBudget, offloading

How = Literal["nothing", "cheap", "everything"]
Forward = Callable[..., Any]

WORKING_LAYERS = 2
"""The memory of a layer's backward pass, as a multiple of the activations that the layer keeps."""
SLACK = 0.05
"""Share of the free memory that is left unused, to allow for fragmentation."""

DEAR = frozenset(
    {
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear",
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "torch_attn::_varlen_attn",
        "_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor",
    }
)  # fmt: skip
"""Operators whose results `selective` keeps: products, attention, and communication."""


class Recompute:
    """Decides for each decoder layer of a model which activations are kept and which are recomputed.

    Args:
        layers: the layers in order of execution; their `forward` is replaced.
        how: what every layer recomputes: `nothing`, `cheap` results or `everything`; None to decide by free memory.
        memory: the memory of the device; read only if `how` is None.
        outside: bytes that the rest of the model needs while all activations exist.
        offload: whether to keep the inputs of recomputed layers in host memory.
        agreed: a collective function that returns the smallest of all ranks' numbers, so that ranks recompute the same layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        how: How | None,
        *,
        memory: MemoryBudget | None = None,
        outside: int = 0,
        offload: bool = False,
        agreed: Callable[[int], int] = lambda keeping: keeping,
    ) -> None:
        self._how, self._memory, self._outside = how, memory, outside
        self._agreed = agreed
        self._held: Callable[[], AbstractContextManager[Any]] = (
            offloading if offload else nullcontext
        )
        self._count = len(layers)
        self._keeping = self._count
        self._bytes_a_token: float | None = None
        for index, layer in enumerate(layers):
            layer.forward = self._wrapped(index, layer.forward)

    @property
    def keeping(self) -> int:
        """The number of layers that kept all their activations in the latest forward pass with a gradient."""
        return self._keeping

    def _wrapped(self, index: int, forward: Forward) -> Forward:
        def run(*args: object, **kwargs: object) -> Any:
            # Recomputation would write into the cache twice.
            cached = kwargs.get("past_key_values") is not None
            if cached or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return self._run(index, forward, args, kwargs)

        return run

    def _run(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        how = self._how
        if how is None:
            if index == 0 and self._bytes_a_token is None:
                return self._measured(forward, args, kwargs)
            if index == 0:
                self._decide(args, kwargs)
            how = "nothing" if index >= self._count - self._keeping else "everything"
        if how == "nothing":
            return forward(*args, **kwargs)
        again: dict[str, Any] = {"context_fn": _keeping_what_is_dear} if how == "cheap" else {}
        with self._held():
            # Without dropout, random states need not be kept.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **again, **kwargs
            )

    def _measured(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the first layer's first pass, and measure the memory that a layer keeps."""
        memory = cast("MemoryBudget", self._memory)
        before = memory.allocated()
        result = forward(*args, **kwargs)
        kept = memory.allocated() - before
        self._bytes_a_token = max(1.0, kept / tokens_of(args, kwargs))
        self._decide(args, kwargs, running=1)
        return result

    def _decide(self, args: object, kwargs: object, running: int = 0) -> None:
        """Decide how many layers of this micro-batch keep their activations.

        Args:
            args: the positional arguments of the first layer's call.
            kwargs: the keyword arguments of the first layer's call.
            running: the number of layers that have already run in this micro-batch and keep their activations.
        """
        assert self._bytes_a_token is not None
        a_layer = self._bytes_a_token * tokens_of(args, kwargs)
        states = _states(args, kwargs)
        inputs = states.numel() * states.element_size()
        free = cast("MemoryBudget", self._memory).free() * (1 - SLACK)
        left = self._count - running
        room = free - self._outside - WORKING_LAYERS * a_layer - left * inputs
        fits = left if a_layer <= inputs else int(room // (a_layer - inputs))
        self._keeping = self._agreed(min(left, max(0, fits)))


def _states(args: Any, kwargs: Any) -> Tensor:
    """Return a layer's input, float [B, L, H]."""
    return cast("Tensor", args[0] if args else kwargs["hidden_states"])


def tokens_of(args: object, kwargs: object) -> int:
    """Return the number of tokens of a layer's input, padding included."""
    rows, length = _states(args, kwargs).shape[:2]
    return int(rows * length)


def _keeping_what_is_dear() -> tuple[Any, Any]:
    def policy(_: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        dear = operator.name().partition(".")[0] in DEAR
        return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
