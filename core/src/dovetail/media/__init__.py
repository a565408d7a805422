"""Images beside prompts: named by their content, kept as files, and turned into what a model is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.media.images import open_image
from dovetail.media.models import model_class, takes_images
from dovetail.media.reference import MediaRef, keep, reference_to

if TYPE_CHECKING:
    from dovetail.media.inputs import ImageInputs
    from dovetail.media.placeholders import produced_placeholders

__all__ = [
    "ImageInputs",
    "MediaRef",
    "keep",
    "model_class",
    "open_image",
    "produced_placeholders",
    "reference_to",
    "takes_images",
]


def __getattr__(name: str) -> Any:
    """What needs torch is loaded when it is asked for; references and files need none."""
    if name == "ImageInputs":
        from dovetail.media.inputs import ImageInputs

        return ImageInputs
    if name == "produced_placeholders":
        from dovetail.media.placeholders import produced_placeholders

        return produced_placeholders
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
