"""Runs whose prompts or examples have images: every engine of theirs must take them."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import PlanError
from dovetail.interfaces.stage import SelectedPlugin

CAPABILITY = "images"
"""The capability of rollout and training engines that accept images."""


def check_images(engines: Sequence[SelectedPlugin]) -> None:
    """Refuse engines that can't take images.

    Args:
        engines: the engines of every model of a run, and of the rollout where it has one.

    Raises:
        PlanError: an engine lacks the capability `images`; names it, and an engine of the run that has it.
    """
    for engine in engines:
        if CAPABILITY not in engine.cls.capabilities:
            able = [e.title for e in engines if CAPABILITY in e.cls.capabilities]
            beside = f"; {able[0]} has it" if able else ""
            raise PlanError(
                f"the data has images, and {engine.title} lacks the capability {CAPABILITY!r}{beside}",
                hint="choose engines that take images (rollout: hf or vllm; actor.engine: fsdp2), or leave those rows out",
            )
