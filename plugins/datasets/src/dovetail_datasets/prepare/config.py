"""Config classes of the recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail_datasets.prepare.recipe import RecipeSection


@attrs.frozen(kw_only=True)
class PairsConfig(RecipeSection):
    """Settings of recipes for preference pairs."""

    overlap: Literal["error", "drop"] = "drop"
    """Treatment of training rows whose prompt is also a validation row's: raise an error, or drop and count them. Dropping is
    the default, since the same short question may occur in both splits.
    """


@attrs.frozen(kw_only=True)
class HhRlhfConfig(PairsConfig):
    """Settings of the recipe `hh_rlhf`."""

    subset: Literal[
        "*", "harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"
    ] = "*"
    """The part of the dataset to prepare; `*` for all parts."""


@attrs.frozen(kw_only=True)
class ReasoningGymRecipeConfig(RecipeSection):
    """Settings of the recipe `reasoning_gym`."""

    overlap: Literal["error", "drop"] = "drop"
    """Treatment of training rows whose prompt is also a validation row's: raise an error, or drop and count them."""
    task: str = ""
    """The task's name in Reasoning Gym."""
    size: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """The number of training rows to make."""
    validation_size: int = attrs.field(default=500, validator=attrs.validators.ge(1))
    """The number of validation rows to make."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of the task's config, such as `options={min_animals: 2}`."""
