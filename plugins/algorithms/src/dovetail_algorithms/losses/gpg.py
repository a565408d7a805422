"""GPG: the plain policy gradient on group advantages (arXiv 2504.02546)."""

from __future__ import annotations

from dovetail_algorithms.losses.reinforce import ReinforceLoss


class GpgLoss(ReinforceLoss):
    """The plain policy gradient on group advantages, L = −A · log π.

    Paper: Group Policy Gradient, arXiv 2504.02546, which omits surrogate, clip and reference policy, and corrects the advantages instead
    (`algorithm.advantage: gpg`). There is no ratio to an older policy, and no ratio metric. Use one mini-batch per rollout, since nothing
    corrects for off-policy data.

    Aggregation: `token_mean`, as in the paper. The loss has no settings.
    """

    name = "gpg"
