"""The checkpoint tensors that vLLM fuses into one layer: an update must have all tensors of a fused layer or none.

vLLM reports that some tensor was loaded into a parameter, but not that all fused tensors were. An update without `k_proj` would
leave a third of `qkv_proj` unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from dovetail.errors import WeightSyncError

Parts = Mapping[str, Sequence[str]]
"""Names of the fused tensors by the name of the fused layer, such as `qkv_proj: [q_proj, k_proj, v_proj]`."""

_SHOWN = 3
_Place = tuple[tuple[str, ...], str, tuple[str, ...]]


def parts_of(model: object) -> dict[str, list[str]]:
    """Return the layers of a vLLM model that fuse several tensors of a checkpoint, with the names of these tensors.

    Returns:
        A mapping as in `Parts`, for packed layers such as `qkv_proj` and for matrices that hold all experts of a layer.
    """
    from vllm.model_executor.utils import get_moe_expert_mapping, get_packed_modules_mapping

    found = {
        whole: list(parts)
        for whole, parts in get_packed_modules_mapping(model).items()
        if len(parts) > 1
    }
    try:
        experts = get_moe_expert_mapping(model)
    except ValueError:
        # Newer versions refuse models without experts.
        return found
    for whole, part, *_ in experts:
        named = found.setdefault(whole, [])
        if part not in named:
            named.append(part)
    return found


@attrs.frozen
class FusedLayers:
    """Checks that weight updates have all tensors of a model's fused layers.

    Args:
        parts: the result of `parts_of`.
        checkpoint: the model's directory in Hugging Face format, or None. Tensors that the checkpoint lacks, such as the value
            projection of a model that uses keys as values, may be missing.
    """

    parts: Parts
    checkpoint: Path | None = None

    def refuse_incomplete(self, version: int, names: Iterable[str]) -> None:
        """Check that an update has all tensors of each fused layer, or none of them.

        Args:
            version: the version of the update, for the error message.
            names: the Hugging Face names of the update's tensors.

        Raises:
            WeightSyncError: tensors are missing; the error names one.
        """
        names = frozenset(names)
        missing = self._missing(names)
        if missing and self.checkpoint is not None:
            there = names_in(self.checkpoint)
            # A part that the checkpoint itself lacks, though it has the part's siblings, is not missing.
            missing = {
                name: sibling
                for name, sibling in missing.items()
                if name in there or sibling not in there
            }
        if not missing:
            return
        name, sibling = min(missing.items())
        more = f" (missing parts of such layers: {len(missing)})" if len(missing) > 1 else ""
        raise WeightSyncError(
            f"weight update {version} has {sibling!r} but not {name!r}; vLLM fuses both into one layer{more}",
            hint="send every tensor of the model; no weight of the engine was changed",
        )

    def _missing(self, names: Collection[str]) -> dict[str, str]:
        """Return the names of missing tensors of fused layers, each with the name of a tensor of the same fused layer that is present."""
        index = {
            tuple(_words(part)): whole for whole, parts in self.parts.items() for part in parts
        }
        lengths = sorted({len(words) for words in index}, reverse=True)
        # Hundreds of experts' tensors make one layer: each layer is checked once, not once for each of its parts.
        siblings: dict[_Place, str] = {}
        for name in names:
            place = _place(name.split("."), index, lengths)
            if place is not None:
                siblings.setdefault(place, name)
        found: dict[str, str] = {}
        for (before, whole, after), sibling in siblings.items():
            for part in self.parts[whole]:
                other = ".".join([*before, *_words(part), *after])
                if other not in names:
                    found[other] = sibling
        return found


def refuse_shrunk(version: int, names: Iterable[str], before: Collection[str]) -> None:
    """Check that an update has every tensor of an earlier complete update, whose tensors are named in `before`.

    Raises:
        WeightSyncError: tensors are missing; the error names them.
    """
    missing = sorted(frozenset(before).difference(names))
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise WeightSyncError(
            f"weight update {version} lacks {shown}{more}, which an earlier update had",
            hint="send every tensor of the model; no weight of the engine was changed",
        )


def names_in(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in a model directory; empty if the directory has no safetensors."""
    listing = directory / "model.safetensors.index.json"
    if listing.is_file():
        return frozenset(json.loads(listing.read_text(encoding="utf-8"))["weight_map"])
    from safetensors import safe_open

    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as tensors:
            found.update(tensors.keys())
    return frozenset(found)


def _words(part: str) -> list[str]:
    return part.strip(".").split(".")


def _place(
    words: list[str], index: Mapping[tuple[str, ...], str], lengths: Sequence[int]
) -> _Place | None:
    """Find the part of a fused layer, such as `q_proj`, in a tensor's name.

    Args:
        words: the name, split at its dots.
        index: the names of fused layers, by the names of their parts split at the dots.
        lengths: the numbers of words to try, in order.

    Returns:
        The words before the part, the name of the fused layer, and the words after the part; None if the name contains no part.
    """
    for length in lengths:
        for start in range(len(words) - length + 1):
            whole = index.get(tuple(words[start : start + length]))
            if whole is not None:
                return tuple(words[:start]), whole, tuple(words[start + length :])
    return None
