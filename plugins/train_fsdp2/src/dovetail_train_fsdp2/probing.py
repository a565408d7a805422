"""Tests whether an architecture supports packing: which arguments its layers pass to attention, and whether anything else mixes tokens.

Legend: B sequences, L length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from dovetail_torch_engines import Sequences
from dovetail_train_fsdp2.attention import PACKED, AttentionPack, attending_by, make_known, register

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "dovetail_probe"
REPLACED = "sdpa"
"""The attention implementation that packing may replace; any other configured implementation is used unchanged."""
FAR = 2**17
"""The number of tokens over which a mask is probed; longer windows count as unlimited."""
_LENGTH = 6
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError)
"""Exceptions of an architecture that does not accept an argument."""
_HARMLESS = frozenset(
    {"pack", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "dropout",
     "scaling", "sliding_window", "layer_idx", "is_causal"}
)  # fmt: skip
"""Arguments of attention that do not change what is computed, or that packed attention honours."""


class Reach:
    """Placeholder that stands for an attention mask while `probe_packing` runs the model, and says how far back tokens attend.

    Args:
        tokens: the number of tokens that each token sees, itself included: the window's size, or `FAR` for all earlier tokens. None for a
            mask that is not a window.
    """

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens


class _Notes:
    """Findings of a test run on attention: how many layers called it, whether any has a sliding window, and why packing is impossible."""

    def __init__(self) -> None:
        self.layers = 0
        self.windowed = False
        self.why_not: str | None = None


@attrs.frozen(kw_only=True)
class PackingSupport:
    """Whether a model supports packing, and packing with shared prompts."""

    why_not: str | None = None
    """The reason why samples of the model can't be packed; None if they can."""
    with_shared_prompts: bool = False
    """Whether each prompt of a pack can be computed once; False if a layer has a sliding window."""


def probe_packing(model: PreTrainedModel) -> PackingSupport:
    """Test whether a model supports packing.

    Every layer must mix tokens only by causal attention through transformers' attention interface, with or without a sliding
    window. The output of a packed test run must confirm this.
    """
    notes = _Notes()
    why_not = _why_not(model, notes)
    return PackingSupport(
        why_not=why_not, with_shared_prompts=why_not is None and not notes.windowed
    )


@torch.no_grad()
def _why_not(model: PreTrainedModel, notes: _Notes) -> str | None:
    name = type(model).__name__
    implementation = model.config._attn_implementation  # noqa: SLF001 - no public name
    if implementation != REPLACED:
        return f"the attention implementation of {name} is {implementation!r}, not {REPLACED!r}"
    base, vocabulary = model.base_model, int(model.get_input_embeddings().weight.shape[0])
    ids_BL = (torch.arange(2 * _LENGTH, device=_device(model)) * 7 % vocabulary).view(2, _LENGTH)
    _make_known()
    try:
        with attending_by(model, PROBE):
            base(input_ids=ids_BL, use_cache=False, pack=notes)
        if notes.why_not is not None:
            return f"{name} {notes.why_not}"
        layers = _attending_layers(model, ids_BL)
        if notes.layers != layers:
            return f"{name} mixes tokens by other means than transformers' attention interface"
        return _wrong(model, ids_BL)
    except _FAILURES as error:
        return f"{name} failed on a packed batch: {str(error).partition(chr(10))[0]}"


def _wrong(model: PreTrainedModel, ids_BL: Tensor) -> str | None:
    """Return what is wrong with the hidden states of a pack; None if they are correct."""
    base, count = model.base_model, ids_BL.numel()
    apart = base(input_ids=ids_BL, use_cache=False).last_hidden_state.flatten(0, 1)
    pack = AttentionPack(sequences=Sequences([_LENGTH, _LENGTH], ids_BL.device))
    positions = (torch.arange(count, device=ids_BL.device) % _LENGTH)[None]

    def packed(ids: Tensor) -> Tensor:
        return base(
            input_ids=ids.view(1, -1), position_ids=positions, use_cache=False, pack=pack
        ).last_hidden_state[0]

    with attending_by(model, PACKED):
        together = packed(ids_BL)
        other = packed(torch.stack([ids_BL[0].flip(0), ids_BL[1]]))
    tolerance = (1e-4 if together.dtype == torch.float32 else 3e-2) * float(apart.abs().max())
    if not torch.allclose(together, apart, rtol=0, atol=tolerance):
        return f"{type(model).__name__} computes other hidden states for packed sequences than for separate ones"
    if not torch.allclose(other[_LENGTH:], together[_LENGTH:], rtol=0, atol=tolerance / 10):
        return f"{type(model).__name__} lets one sequence of a pack influence another"
    return None


def _attending_layers(model: PreTrainedModel, ids_BL: Tensor) -> int | None:
    """Return the number of layers that cache keys and values; None if a layer caches something else, such as a recurrent state."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids_BL, past_key_values=cache, use_cache=True)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return len(cache.layers) if plain else None


def _device(model: PreTrainedModel) -> torch.device:
    return model.get_input_embeddings().weight.device


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - transformers' signature
    value: Tensor,
    attention_mask: Reach | None,
    *,
    pack: _Notes,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record in `pack` whether packing supports the arguments that a layer passes to its attention; return zeros as the output."""
    pack.layers += 1
    unknown = sorted(
        name for name, value in options.items() if value is not None and name not in _HARMLESS
    )
    window = options.get("sliding_window")
    pack.windowed |= window is not None
    if unknown:
        pack.why_not = f"passes the unsupported argument {unknown[0]!r} to its attention"
    elif options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        pack.why_not = "attends to later tokens"
    elif attention_mask is None or attention_mask.tokens is None:
        pack.why_not = "uses an attention mask that packing does not support"
    elif attention_mask.tokens != (FAR if window is None else min(window, FAR)):
        pack.why_not = f"uses an attention mask that differs from its sliding_window of {window}"
    return value.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None


def _probe_mask(*, mask_function: Callable[..., Tensor], **_: object) -> Reach:
    """Return how far back a mask function lets tokens attend; `tokens` is None if the distance differs between tokens."""
    reaches = {_reach(mask_function, at) for at in (FAR - 1, FAR, FAR + 37)}
    return Reach(reaches.pop() if len(reaches) == 1 else None)


def _reach(mask_function: Callable[..., Tensor], at: int) -> int | None:
    keys = torch.arange(at + 8)
    allowed = torch.as_tensor(
        mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(at), keys)
    )
    allowed = allowed.expand(len(keys)).bool()
    seen = int(allowed.sum())
    if not bool(allowed[at + 1 - seen : at + 1].all()):
        return None
    return min(seen, FAR) if seen < FAR or seen == at + 1 else None


@cache
def _make_known() -> None:
    make_known()
    register(PROBE, _probe_attention, _probe_mask)
