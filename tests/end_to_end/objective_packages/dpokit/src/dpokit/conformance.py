"""The suite of the objective."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.batch import Batch
from dovetail_sdk.testing.conformance import ObjectiveConformance
from dpokit.config import DpoConfig
from dpokit.dpo import Dpo
from dpokit.oracle import dpo


class TestDpo(ObjectiveConformance):
    """A strong tie, so that margins count."""

    plugin = Dpo
    config = DpoConfig(name="kit_dpo", beta=0.5)

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """By the paper."""
        loss, gradient_T = dpo(mini_batch, outputs["log_probs"], 0.5)
        return loss, {"log_probs": gradient_T}
