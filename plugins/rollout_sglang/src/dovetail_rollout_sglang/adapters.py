"""Adapters inside SGLang's schedulers: received low-rank weights become the adapter that requests name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import AdapterSpec, WeightManifest
from dovetail_serving import without_room

_NAME = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused layers of SGLang, each with the layers that it consists of, in order."""
_FUSED_OF = {part: fused for fused, parts in _FUSED.items() for part in parts}


class Adapters:
    """The adapters of one SGLang scheduler.

    SGLang keeps adapters in host memory, and copies a batch's adapter to memory reserved on the accelerator.

    Args:
        manager: SGLang's LoRAManager; None in a server that was started without support for adapters.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def refuse_none(self, manifest: WeightManifest) -> None:
        """Check, before an adapter is received, that the server was started with support for adapters and that the manifest describes one.

        Raises:
            WeightSyncError: the server was started without support for adapters, or the manifest describes no adapter.
        """
        if self._manager is None or manifest.adapter is None:
            raise without_room(manifest.version, "SGLang")

    def load(
        self, manifest: WeightManifest, tensors: Mapping[str, Tensor], name: str, keep: str | None
    ) -> None:
        """Load an adapter beside the current adapter, and remove all other adapters. On failure the current adapter stays.

        Args:
            manifest: the manifest of the adapter.
            tensors: all tensors by peft's names, verified: A [r, in] and B [out, r] of each adapted layer.
            name: the adapter's name in requests; never used before, since SGLang caches by name.
            keep: the name of the current adapter; None if there is none.

        Raises:
            WeightSyncError: the adapter exceeds the memory reserved for adapters, or SGLang refuses it.
        """
        from sglang.srt.lora.lora_registry import LoRARef

        self.refuse_none(manifest)
        assert manifest.adapter is not None  # refused above
        whole = self._completed(tensors)
        self.drop_all_but(keep)
        manager = self._manager
        ref = LoRARef(lora_id=name, lora_name=name, lora_path=f"memory:{name}", pinned=False)
        result = manager.load_lora_adapter_from_tensors(
            ref, whole, lora_config(manifest.adapter, whole)
        )
        if not result.success:
            for table in (manager.configs, manager.loras, manager.lora_refs):
                table.pop(name, None)
            raise WeightSyncError(
                f"SGLang can't load the adapter of weight update {manifest.version}: {result.error_message}"
            )

    def drop_all_but(self, keep: str | None) -> None:
        """Free the memory of all adapters except `keep`."""
        if self._manager is None:
            return
        for name, ref in list(self._manager.lora_refs.items()):
            if name != keep:
                self._manager.unload_lora_adapter(ref)

    def _completed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, and zeros for parts of fused layers that the adapter does not change: SGLang ignores an incomplete
        fused layer.

        Raises:
            WeightSyncError: a tensor belongs to a layer that can't be adapted.
        """
        found = dict(tensors)
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            base = None if match is None else self._base_layer(match["path"])
            if match is None or base is None:
                raise WeightSyncError(
                    f"SGLang reserved no memory for adapters of the layer {name!r}, only for "
                    f"{', '.join(sorted(self._manager.target_modules))}",
                    hint="name the layer in rollout.adapter_modules, or send merged weights "
                    "(actor.engine.lora.sync: merged)",
                )
            above, _, leaf = match["path"].rpartition(".")
            fused = _FUSED_OF.get(leaf)
            for number, part in enumerate(_FUSED[fused] if fused else ()):
                other = name.replace(f"{above}.{leaf}.", f"{above}.{part}.")
                if other in found:
                    continue
                rows = tensor.shape[0] if match["side"] == "A" else _rows(base, number)
                found[other] = torch.zeros(rows, tensor.shape[1], dtype=tensor.dtype)
        return found

    def _base_layer(self, path: str) -> Any:
        """Return the SGLang layer, fused or not, that has the weights of a checkpoint's layer; None if SGLang can't adapt this layer.

        Args:
            path: the name of the checkpoint's layer, such as `model.layers.0.self_attn.q_proj`.
        """
        layer = _LAYER.search(path)
        above, _, leaf = path.rpartition(".")
        if layer is None or int(layer[1]) >= len(self._manager.lora_modules):
            return None
        # In multimodal models, the names before the layers differ.
        wanted = f"{above}.{_FUSED_OF.get(leaf, leaf)}"[layer.start() :].lstrip(".")
        for name, module in self._manager.lora_modules[int(layer[1])].items():
            if name == wanted or name.endswith(f".{wanted}"):
                return module.base_layer
        return None


def lora_config(spec: AdapterSpec, names: Iterable[str]) -> dict[str, Any]:
    """Return SGLang's description of an adapter, with the keys of peft's `adapter_config.json`.

    SGLang always scales by alpha / r. For rank-stabilised adapters, whose factor is alpha / √r (arXiv 2312.03732), the returned
    alpha is therefore √r times as large.

    Args:
        spec: the specification of the adapter.
        names: the names of the adapter's tensors.
    """
    layers = {match["path"].rpartition(".")[2] for match in map(_NAME.fullmatch, names) if match}
    return {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha * (spec.rank**0.5 if spec.rank_stabilised else 1.0),
        "use_dora": spec.dora,
        "target_modules": sorted(layers),
    }


def _rows(base: Any, part: int) -> int:
    """Return the number of outputs, over all ranks, of the layer at index `part` of a fused layer (see `_FUSED`)."""
    if hasattr(base, "total_num_kv_heads"):
        heads = base.total_num_heads if part == 0 else base.total_num_kv_heads
        size = getattr(base, "v_head_size", base.head_size) if part == 2 else base.head_size
        return int(heads * size)
    return int(base.output_sizes[part])
