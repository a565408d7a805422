"""PlainAdapter: a low-rank adapter for tests, as a trainer sends it, and the model with the adapter merged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs
import torch
from torch import Tensor

from dovetail.interfaces import AdapterSpec, WeightManifest
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.transport_ends import manifest_of

_BEFORE = "base_model.model."
"""The prefix that peft adds to the names of a model's layers."""


@attrs.frozen
class PlainAdapter:
    """A low-rank adapter in the layout of weight updates.

    Legend: r is the rank, s the scale. An adapted layer's weight W is [out, in], and becomes W + s · B A.
    """

    manifest: WeightManifest
    """Manifest of kind `adapter`, which lists the tensors in order."""
    tensors: dict[str, Tensor]
    """A [r, in] and B [out, r] of every adapted layer by peft's names, float32 on the CPU."""

    @classmethod
    def random(
        cls,
        base: PlainModel,
        version: int,
        modules: Collection[str],
        *,
        rank: int = 4,
        alpha: float = 8.0,
        rank_stabilised: bool = False,
        strength: float = 0.02,
        seed: int | None = None,
    ) -> PlainAdapter:
        """Return a random adapter, which adds s · B A to the weight of each adapted layer; A is [r, in] and B is [out, r].

        Args:
            base: the base model.
            version: the version of the update.
            modules: last parts of the names of the adapted layers, such as `q_proj`.
            rank: the rank r.
            alpha: the numerator of the scale s in s · B A.
            rank_stabilised: whether s is alpha / √r instead of alpha / r (arXiv 2312.03732).
            strength: standard deviation of the entries of B; it is 1 for the entries of A.
            seed: the random seed; by default the version.
        """
        generator = torch.Generator().manual_seed(version if seed is None else seed)
        tensors: dict[str, Tensor] = {}
        for name, weight in base.weights().items():
            path, _, last = name.rpartition(".")
            if last != "weight" or path.rpartition(".")[2] not in modules:
                continue
            rows, columns = weight.shape
            down = torch.randn(rank, columns, generator=generator)
            up = torch.randn(rows, rank, generator=generator)
            tensors[f"{_BEFORE}{path}.lora_A.weight"] = down
            tensors[f"{_BEFORE}{path}.lora_B.weight"] = strength * up
        spec = AdapterSpec(
            rank=rank,
            alpha=alpha,
            rank_stabilised=rank_stabilised,
            target_modules=tuple(sorted(modules)),
        )
        return cls._of(tensors, version=version, adapter=spec)

    def renamed(self, module: str, other: str) -> PlainAdapter:
        """Return a copy of the adapter for layers named `other` instead of `module`."""
        tensors = {
            name.replace(f".{module}.", f".{other}."): tensor
            for name, tensor in self.tensors.items()
        }
        return self._of(tensors, version=self.manifest.version, adapter=self.manifest.adapter)

    def merged(self, base: PlainModel) -> PlainModel:
        """Return the base model with the adapter added to its weights: W + s · B A, with scale s, in each adapted layer."""
        spec = self.manifest.adapter
        assert spec is not None
        scale = spec.alpha / (spec.rank**0.5 if spec.rank_stabilised else spec.rank)
        added = {}
        for name, down in self.tensors.items():
            path, found, _ = name.removeprefix(_BEFORE).partition(".lora_A.")
            if found:
                up = self.tensors[name.replace(".lora_A.", ".lora_B.")]
                added[f"{path}.weight"] = scale * (up @ down)
        return base.plus(added)

    @classmethod
    def _of(cls, tensors: dict[str, Tensor], **fields: Any) -> PlainAdapter:
        specs = manifest_of(tensors).tensors
        return cls(WeightManifest(kind="adapter", tensors=specs, **fields), tensors)
