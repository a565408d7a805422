"""ImageInputs: converts the images of prompts to the tensors that a transformers model takes beside the token ids.

Legend: B sequences of L tokens, padding included.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import DataError, ModelError
from dovetail.interfaces import MediaRef
from dovetail.sections import ModelSection
from dovetail_datasets.media.images import open_image
from dovetail_datasets.media.processor import load_image_processor
from dovetail_datasets.models.classes import image_token_of, takes_images

KEPT_BYTES = 1 << 30
"""Maximum bytes of pixels that are kept in host memory for the next pass over the same images."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the model inputs that mark image placeholders by 1 and other tokens by 0."""


class ImageInputs:
    """Converts images to a model's inputs with its own image processor. Each image is processed by itself, and cached.

    Args:
        model: the transformers model of the inputs.
        section: the model's section, with the path of its image processor.

    Raises:
        ModelError: the model takes no images, or its image processor can't be loaded.
    """

    def __init__(self, model: Any, section: ModelSection) -> None:
        if not takes_images(model.config):
            raise ModelError(
                f"the model {section.path!r} ({type(model).__name__}) takes no images, but a prompt has images",
                hint="set model.path to a vision-language model, or leave the rows with images out",
            )
        self._processor = load_image_processor(section)
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._token = image_token_of(model.config)
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0

    @property
    def image_token(self) -> int:
        """The placeholder token of images."""
        assert self._token is not None
        return self._token

    def of(
        self, ids_BL: Tensor, shown_BL: Tensor, media: Sequence[Sequence[MediaRef]]
    ) -> dict[str, Tensor]:
        """Return the arguments of the model's `forward` besides ids, mask and positions.

        Args:
            ids_BL: the token ids, int64 [B, L].
            shown_BL: a mask, bool [B, L], True where tokens may be image placeholders: in text that the policy did not produce.
            media: the images of each sequence, in the order of their tokens.

        Returns:
            The image processor's outputs (`pixel_values`, …), all images one after another; and, if the model needs them, token types,
            int64 [B, L], that mark image tokens. Empty without images.

        Raises:
            DataError: an image can't be read or decoded.
            ModelError: the images' tensors can't be concatenated, since their shapes differ.
        """
        found = [self._of_image(reference) for images in media for reference in images]
        if not found:
            return {}
        joined = {name: _joined(name, [one[name] for one in found]) for name in found[0]}
        inputs = {name: tensor.to(ids_BL.device) for name, tensor in joined.items()}
        stands_BL = ((ids_BL == self.image_token) & shown_BL).to(torch.int64)
        return inputs | {name: stands_BL for name in _TYPES if name in self._accepted}

    def _of_image(self, reference: MediaRef) -> dict[str, Tensor]:
        known = self._kept.get(reference.digest)
        if known is not None:
            self._kept.move_to_end(reference.digest)
            return known
        picture = open_image(reference.read(), f"the image {reference.path!r}")
        try:
            outputs: Mapping[str, Any] = self._processor(images=[picture], return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            raise DataError(
                f"the image {reference.path!r} ({picture.width} × {picture.height} pixels) was refused by the "
                f"model's image processor {type(self._processor).__name__}: {error}",
                hint="scale the image, or remove the row",
            ) from error
        made = {
            name: value
            for name, value in outputs.items()
            if name in self._accepted and isinstance(value, Tensor)
        }
        self._keep(reference.digest, made)
        return made

    def _keep(self, digest: str, made: dict[str, Tensor]) -> None:
        self._kept[digest] = made
        self._bytes += _bytes_of(made)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _bytes_of(oldest)


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = sorted({tuple(part.shape) for part in parts})
        raise ModelError(
            f"images of different sizes give tensors {name!r} of the shapes {shapes[0]} and {shapes[-1]}, which can't be concatenated: "
            "this model's image processor gives equal shapes only to images that it processes together",
            hint="scale the images to one size, or use a model whose image processor cuts them into patches or scales them itself",
        )
    return torch.cat(parts)


def _bytes_of(made: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in made.values())
