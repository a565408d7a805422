"""Samples with images: their micro-batches, and the vision part of a model.

Samples with images are padded, in micro-batches of their own. They are not packed, and their prompts are computed for every sample.
The vision tower runs within the model's forward pass, on the images of the micro-batch.
Legend: N samples of a batch, B samples of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from torch import Tensor, nn

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.errors import ConfigError
from dovetail_torch_engines import Samples
from dovetail_train_fsdp2.packing import Means, MicroBatchPlan, cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEDIA = "media"
"""The column that names a sample's images."""
IMAGE_MASK = "image_mask"
"""The column that marks the response tokens that stand for images."""


def has_images(batch: Batch) -> bool:
    """Return whether any sample of the batch has an image."""
    return MEDIA in batch and any(batch[MEDIA])


def cut_with_images(
    batch: Batch, budget: int, means: Means, at_least: int, unit: Unit, *, together: int
) -> list[MicroBatchPlan]:
    """Divide a batch with images into micro-batches: samples with images are padded, others laid out as `means` allows.

    Args:
        batch: the samples, with the columns that `cut` needs.
        budget: the token limit of a micro-batch.
        means: the allowed layouts of samples without images.
        at_least: the minimum number of micro-batches.
        unit: the kind of unit whose samples stay together, such as `group`; one image makes all samples of its unit padded.
        together: the number of ranks among which each sequence is divided.

    Raises:
        ConfigError: `together` is above 1, which needs packing.
    """
    if together > 1:
        raise ConfigError(
            f"sequence_parallel_size={together} can't be used with images: it needs packed samples, and samples with images are "
            "padded",
            hint="use sequence_parallel_size=1",
        )
    shown_N = np.array([bool(media) for media in batch[MEDIA]])
    unit_N = Samples.of(batch, unit).unit_N
    if unit_N is not None:
        shown_N = np.isin(unit_N, unit_N[shown_N])
    padded = attrs.evolve(means, packing="never", share="never", share_packed="never")
    if shown_N.all():
        return cut(batch, budget, padded, at_least, unit)
    images_B, text_B = np.flatnonzero(shown_N), np.flatnonzero(~shown_N)
    images = cut(batch.take(images_B), budget, padded, unit=unit)
    text = cut(batch.take(text_B), budget, means, max(1, at_least - len(images)), unit)
    return [
        attrs.evolve(plan, rows_B=rows_B[plan.rows_B])
        for rows_B, plans in ((images_B, images), (text_B, text))
        for plan in plans
    ]


def language_of(trunk: PreTrainedModel) -> nn.Module:
    """Return the language model inside a vision-language model; any other model itself."""
    language = getattr(getattr(trunk, "base_model", trunk), "language_model", None)
    return language if isinstance(language, nn.Module) else trunk


def vision_parameters(trunk: PreTrainedModel) -> list[Tensor]:
    """Return the parameters of the vision part, of any shape: all but those of the language model and its head.

    The parameters are looked up at every call, since sharding replaces them.
    """
    language, head = language_of(trunk), trunk.get_output_embeddings()
    if language is trunk:
        return []
    known = {id(p) for part in (language, head) if part is not None for p in part.parameters()}
    return [p for p in trunk.parameters() if id(p) not in known]


def freeze_vision(trunk: PreTrainedModel) -> None:
    """Freeze the parameters of the vision tower and its projector.

    Raises:
        ConfigError: the model has no vision tower.
    """
    parameters = vision_parameters(trunk)
    if not parameters:
        raise ConfigError(
            f"freeze_vision is set, but {type(trunk).__name__} has no vision tower",
            hint="leave freeze_vision out of the engine's section",
        )
    for parameter in parameters:
        parameter.requires_grad_(False)
