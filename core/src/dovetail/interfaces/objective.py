"""ObjectiveSpec: what an engine minimises, as data that each worker rebuilds for itself."""

from __future__ import annotations

import attrs

from dovetail.interfaces.runtime import PluginRef


@attrs.frozen(kw_only=True)
class KlTerm:
    """A KL penalty to the reference policy inside the loss."""

    estimator: str
    """A name of `dovetail.numerics.kl.ESTIMATORS`."""
    coef: float
    """Weight of the penalty, after the controller."""


@attrs.frozen(kw_only=True)
class ObjectiveSpec:
    """Plugin names with their resolved config, and required columns.

    Rebuilt in each worker by `dovetail.training.build_objective`, through the plugin index:
    nothing is registered in one process and hoped for in another.
    """

    policy_loss: PluginRef
    loss_aggregation: PluginRef
    kl: KlTerm | None = None
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; the loss falls as entropy rises."""
    measure_entropy: bool = False
    """Report the policy's entropy even where it has no weight."""
    old_log_probs_from_current: bool = False
    """One mini-batch a rollout: the old policy is the current one, so no pass of its own is needed."""
    correction: PluginRef | None = None
    """The rollout correction, where it is worked out in every micro-batch from the current log-probabilities."""
    weighted: bool = False
    """Multiply each token's policy loss by the column `rollout_is_weights`, made before the update."""
    requires: frozenset[str] = frozenset()
    """Columns that every mini-batch must carry."""

    @property
    def outputs(self) -> frozenset[str]:
        """What the engine computes for it, besides what the loss itself requires."""
        entropies = {"entropies"} if self.entropy_coef or self.measure_entropy else set()
        return frozenset({"log_probs"} | entropies)


@attrs.frozen(kw_only=True)
class ValueObjectiveSpec:
    """What a critic minimises: the value loss of PPO (arXiv 1707.06347).

    L = ½ max((V − R)², (clip(V, V_old ± clip) − R)²)
    """

    loss_aggregation: PluginRef
    clip: float | None = 0.5
    """How far a value may move from the one before the update; None for any."""
    requires: frozenset[str] = frozenset({"values", "returns", "response_mask"})
    """Columns that every mini-batch must carry; `values` are those before the update."""

    @property
    def outputs(self) -> frozenset[str]:
        """What the engine computes for it."""
        return frozenset({"values"})


@attrs.frozen(kw_only=True)
class PreferenceObjectiveSpec:
    """What a reward model minimises: the Bradley–Terry loss of preference pairs (arXiv 2203.02155, equation 1).

    L = −1/P Σ_p log σ(r(chosen_p) − r(rejected_p))

    where a response's r is its value at its one token with mask 1. The two of a pair may come in different micro-batches and
    on different ranks: each brings the other's r along.
    """

    requires: frozenset[str] = frozenset({"preferred", "other_scores", "response_mask"})
    """Columns that every mini-batch must carry: bool [N], whether it is its pair's chosen one; float32 [N], the other's r
    under the weights that the update starts from (`dovetail.numerics.with_other_scores`)."""

    @property
    def outputs(self) -> frozenset[str]:
        """What the engine computes for it."""
        return frozenset({"values"})


AnyObjectiveSpec = ObjectiveSpec | ValueObjectiveSpec | PreferenceObjectiveSpec
