"""ImplicitProcessRewards: a reward for each token, from a model that is trained on outcomes alone (PRIME, arXiv 2502.01456).

    r_φ(y_t) = β log(π_φ(y_t | x, y_<t) / π_ref(y_t | x, y_<t))

where π_φ is the process reward model before this step's updates, and π_ref its initial model. Legend: T response tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.batch import Batch, Column
from dovetail.errors import PlanError
from dovetail.interfaces import PlanFacts, Stage, StepContext
from dovetail_algorithms.config.stages import ImplicitProcessRewardsConfig

REFERENCE = "prm_ref_log_probs"
OUTCOMES = "prm_outcomes"
"""Column with a copy of `scores`, made before a KL penalty or a later stage changes them, since outcomes have to be in [0, 1]."""
RUNS_OWN = "ref_log_probs"
"""Column with the log-probabilities of the run's reference policy."""


class ImplicitProcessRewards(Stage):
    """Scores every response token with a process reward model and its reference.

    The plan adds this stage if a plugin requires `process_rewards`, as the estimator `prime` does. The model scores once, before its own
    update in the step: the paper's single forward pass.
    """

    name = "implicit_process_rewards"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ImplicitProcessRewardsConfig
    phase = "score"
    after = ("score_actor", "score_ref")
    columns: ClassVar[tuple[Column, ...]] = (
        Column(
            "process_rewards",
            "float32",
            "ragged",
            "implicit process reward of each token",
            "stage",
            "response_ids",
        ),
        Column(
            REFERENCE,
            "float32",
            "ragged",
            "log-probability of each token by the process reward model's reference, full softmax",
            "stage",
            "response_ids",
        ),
        Column(
            OUTCOMES,
            "float32",
            "dense",
            "score by which the process reward model learns, before penalties",
            "stage",
        ),
    )

    @classmethod
    def requires(cls, config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> frozenset[str]:
        """Return `response_mask` and `scores`, and `ref_log_probs` if the run's reference policy is also the reward model's."""
        _check(config, facts)
        own = config.reference is not None or _has_adapter(config, facts)
        return frozenset({"response_mask", "scores"} | (set() if own else {RUNS_OWN}))

    @classmethod
    def provides(cls, config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"process_rewards", REFERENCE, OUTCOMES})

    @classmethod
    def roles(cls, config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> tuple[str, ...]:
        return (config.role,) if config.reference is None else (config.role, config.reference)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Add the process rewards. Metrics, prefixed by the role's name: `prm/process_reward`, the mean per token; `prm/outcome_reward`,
        the sum over a response's tokens, averaged over samples.
        """
        config, outputs = self.config, {"log_probs"}
        if config.reference is None and _has_adapter(config, step.facts):
            outputs.add(RUNS_OWN)
        scored = step.roles[config.role].forward(batch, frozenset(outputs)).result()
        if config.reference is not None:
            other = step.roles[config.reference].forward(batch, frozenset({"log_probs"})).result()
            reference = other["log_probs"]
        else:
            reference = (scored if RUNS_OWN in outputs else batch)[RUNS_OWN]
        beta = _objective(config, step.facts).beta
        rewards_T = (beta * (scored["log_probs"].values - reference.values)).astype("float32")
        tokens = int(batch["response_mask"].values.sum())
        total = float(rewards_T.sum(dtype="float64"))
        step.metrics |= {
            f"{config.role}/process_reward": total / max(tokens, 1),
            f"{config.role}/outcome_reward": total / len(batch),
        }
        return batch.with_columns(
            {
                REFERENCE: reference,
                "process_rewards": batch["response_mask"].with_values(rewards_T),
                OUTCOMES: batch["scores"],
            }
        )


def _check(config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> None:
    """Check that the run's config has the process reward model's role, its objective and its reference.

    Raises:
        PlanError: the role is missing, its objective has no `beta`, or no frozen copy of its initial model is available as the reference.
    """
    role, roles = config.role, facts.config.roles
    if role not in roles:
        raise PlanError(
            f"the stage {ImplicitProcessRewards.name!r} needs the role {role!r}, but the config has only the roles "
            f"{', '.join(facts.config.role_sections)}",
            hint=f"add the role: set roles.{role}.objective=implicit_prm",
        )
    if not hasattr(_objective(config, facts), "beta"):
        raise PlanError(
            f"roles.{role} is not an implicit process reward model: its objective has no setting `beta`",
            hint=f"set roles.{role}.objective=implicit_prm",
        )
    if config.reference is None and not _has_adapter(config, facts):
        start = facts.config.model.path
        own, ref = roles[role].path or start, facts.config.ref.path or start
        if own != ref or facts.config.ref.update is not None:
            raise PlanError(
                f"roles.{role} starts from {own} and needs a frozen copy of this model as its reference, but the reference policy "
                + ("follows the actor" if own == ref else f"is another model, {ref}"),
                hint=f"add a frozen role of the same model: set roles.{role}_ref.path={own}, and `reference: {role}_ref` in the stage "
                f"{ImplicitProcessRewards.name} of algorithm.stages",
            )


def _objective(config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> Any:
    """Return the config of the process reward model's objective; None if the model is not trained."""
    selected = facts.plugins.get(f"roles.{config.role}.objective")
    return selected and selected.config


def _has_adapter(config: ImplicitProcessRewardsConfig, facts: PlanFacts) -> bool:
    """Return whether the engine of the process reward model can also score tokens with the adapter turned off, as the reference."""
    return RUNS_OWN in facts.engine(config.role).provides()
