"""BestWorstPairs: preference pairs from a rollout, for online DPO (arXiv 2402.04792). N samples, G groups, P pairs."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch
from dovetail.errors import PlanError
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext


class BestWorstPairs(Stage):
    """Keeps each group's highest-scored sample as chosen and its lowest-scored sample as rejected; drops all others.

    Among samples with equal scores, the one that was requested first is used. A group whose scores are all equal has no pair and is
    dropped.

    In a config:

        actor: {objective: {name: dpo, beta: 0.1}}
        algorithm: {stages: [best_worst_pairs]}
    """

    name = "best_worst_pairs"
    api = ">=1.1,<2"
    capabilities = frozenset({"deterministic"})
    phase = "score"
    before = ("old_log_probs_from_rollout", "score_actor", "score_ref", "score_critic")
    changes_samples = True

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return `scores`, `group_id` and `sample_index`.

        Raises:
            PlanError: groups have only one sample.
        """
        if facts.config.rollout.n < 2:
            raise PlanError(
                "the stage 'best_worst_pairs' needs at least two samples of each prompt to form a pair, but rollout.n is 1",
                hint="set rollout.n=2 or more",
            )
        return frozenset({"scores", "group_id", "sample_index"})

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"pair_id", "chosen"})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Return the batch of pairs. Metrics: `reward/pairs` and `reward/tied_groups` count the pairs and the dropped groups;
        `reward/pair_margin` is the mean difference of a pair's scores.
        """
        scores_N, group_N = batch["scores"].astype(np.float64), batch["group_id"]
        best_G, worst_G = (
            _first(group_N, np.lexsort((batch["sample_index"], sign * scores_N, group_N)))
            for sign in (-1, 1)
        )
        margins_G = scores_N[best_G] - scores_N[worst_G]
        pairs_P = np.flatnonzero(margins_G > 0)
        step.metrics |= {
            "reward/pairs": float(len(pairs_P)),
            "reward/tied_groups": float(len(best_G) - len(pairs_P)),
        }
        if len(pairs_P):
            step.metrics["reward/pair_margin"] = float(margins_G[pairs_P].mean())
        rows_P2 = np.stack([best_G[pairs_P], worst_G[pairs_P]], axis=1)
        kept = batch.take(rows_P2.ravel())
        return kept.with_columns(
            {
                "pair_id": np.repeat(np.arange(len(pairs_P)), 2),
                "chosen": np.tile(np.array([True, False]), len(pairs_P)),
            }
        )


def _first(group_N: np.ndarray, order_N: np.ndarray) -> np.ndarray:
    """Return, for each group, the index of the row that comes first in `order_N`, int64 [G].

    Args:
        group_N: the group of each row.
        order_N: an order of the rows, as indices, in which the rows of a group are adjacent.
    """
    sorted_N = group_N[order_N]
    begins_N = np.concatenate([[True], sorted_N[1:] != sorted_N[:-1]])
    return order_N[begins_N]
