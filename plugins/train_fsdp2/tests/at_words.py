"""An objective on the log-probabilities of the token ids in a column."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm
from dovetail_stages import all_finite, mean_metric, on_device

K = 5


class AtWords(Objective):
    """L = −Σ w log π(word) / N over K words of each token: the column `words`, with the weights in `word_weights`."""

    name = "at_words"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"response_mask", "word_weights"})

    @classmethod
    def outputs(cls, config: Any) -> Any:
        return (OUTPUTS["log_probs"], OUTPUTS["log_probs_at"].sized(K, reads={"words"}))

    def denominators(self, mini_batch: Any, reduction: Any) -> dict[str, float]:
        own = np.array([mini_batch["response_mask"].values.sum()], np.float64)
        return {"tokens": float(reduction.sum(own)[0])}

    def term(
        self, outputs: Any, micro_batch: Any, denominators: Any, scalars: Any
    ) -> ObjectiveTerm:
        at_TK = outputs["log_probs_at"]
        mask_T = on_device(micro_batch["response_mask"].values, at_TK)
        weights_TK = on_device(micro_batch["word_weights"].values, at_TK)
        losses_T = -(weights_TK * at_TK).sum(-1) - outputs["log_probs"]
        losses_T = losses_T.masked_fill(~mask_T, 0)
        loss = losses_T.sum() / denominators["tokens"]
        return ObjectiveTerm(
            loss=loss,
            metrics={"actor/nll": mean_metric(losses_T, mask_T)},
            finite=all_finite(loss, {"losses": losses_T}),
        )
