"""GPG: the plain policy gradient on group advantages (arXiv 2504.02546)."""

from __future__ import annotations

from dovetail_algorithms.losses.reinforce import ReinforceLoss


class GpgLoss(ReinforceLoss):
    """The plain policy gradient on group advantages, L = −A · log π.

    Paper: Group Policy Gradient, arXiv 2504.02546, which leaves surrogate, clip and reference out, and corrects the
    advantages instead (`algorithm.advantage: gpg`). There is no ratio to an older policy, hence no metric of one:
    take one mini-batch a rollout, since nothing corrects for a policy that has moved on.

    Aggregation: `token_mean`, as in the paper. It has no settings.
    """

    name = "gpg"
