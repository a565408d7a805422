"""Samples with images: what of a batch and of a model they concern.

Micro-batches with images are padded: their samples are not put end to end, and prompts are computed for every sample.
The vision tower runs within the model's forward pass, on the images of the micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from torch import Tensor, nn

from dovetail.batch import Batch
from dovetail.errors import ConfigError
from dovetail_train_fsdp2.packing import Means

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEDIA = "media"
"""The column that names a sample's images."""
IMAGE_MASK = "image_mask"
"""The column that marks a response's tokens which stand for images."""


def has_images(batch: Batch) -> bool:
    """Whether a sample of the batch has an image."""
    return MEDIA in batch and any(batch[MEDIA])


def padded(means: Means, *, together: int) -> Means:
    """The layouts for a batch with images.

    Args:
        means: those for text.
        together: ranks that share each sequence.

    Raises:
        ConfigError: several do, which takes packs.
    """
    if together > 1:
        raise ConfigError(
            f"sequence_parallel_size {together} needs samples fed end to end, and samples with images are padded",
            hint="use sequence_parallel_size=1",
        )
    return attrs.evolve(means, packing="never", share="never", share_packed="never")


def language_of(trunk: PreTrainedModel) -> nn.Module:
    """The language model within a vision-language model; the model itself where it is nothing else."""
    language = getattr(getattr(trunk, "base_model", trunk), "language_model", None)
    return language if isinstance(language, nn.Module) else trunk


def vision_parameters(trunk: PreTrainedModel) -> list[Tensor]:
    """What turns pixels into embeddings: all parameters, of any shape, but those of the language model and its head.

    They are looked up at every call, since sharding puts other tensors in their place.
    """
    language, head = language_of(trunk), trunk.get_output_embeddings()
    if language is trunk:
        return []
    known = {id(p) for part in (language, head) if part is not None for p in part.parameters()}
    return [p for p in trunk.parameters() if id(p) not in known]


def freeze_vision(trunk: PreTrainedModel) -> None:
    """Leave the vision tower, and what projects its output, as they are.

    Raises:
        ConfigError: the model has none.
    """
    parameters = vision_parameters(trunk)
    if not parameters:
        raise ConfigError(
            f"freeze_vision is set, and {type(trunk).__name__} has no vision tower",
            hint="leave freeze_vision out of the engine's section",
        )
    for parameter in parameters:
        parameter.requires_grad_(False)
