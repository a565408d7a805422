"""Check of runs with images: every engine must accept images."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import PlanError
from dovetail.interfaces.stage import SelectedPlugin

CAPABILITY = "images"
"""The capability of rollout and training engines that accept images."""


def check_images(engines: Sequence[SelectedPlugin]) -> None:
    """Check that every engine accepts images.

    Args:
        engines: the training engines of all models of a run, and the rollout engine if there is one.

    Raises:
        PlanError: an engine lacks the capability `images`; the error names this engine, and one with the capability.
    """
    for engine in engines:
        if CAPABILITY not in engine.cls.capabilities:
            able = [e.title for e in engines if CAPABILITY in e.cls.capabilities]
            beside = f"; {able[0]} has it" if able else ""
            raise PlanError(
                f"the data has images, but {engine.title} lacks the capability {CAPABILITY!r}{beside}",
                hint="choose engines that take images (rollout: hf or vllm; actor.engine: fsdp2), or remove the rows with images",
            )
