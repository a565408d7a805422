"""Settings of the trainers."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import TrainerSection


@attrs.frozen(kw_only=True)
class OnPolicyConfig(TrainerSection):
    """On-policy training."""


@attrs.frozen(kw_only=True)
class SupervisedConfig(TrainerSection):
    """Training on the examples of a dataset."""

    examples: Literal["conversations", "preferences", "unpaired_preferences"] = "conversations"
    """What the rows are: conversations (`messages`, or `prompt` and `response`), preference pairs (`prompt`, `chosen`,
    `rejected`), or responses that were rated alone (`prompt`, `response`, `label`)."""
