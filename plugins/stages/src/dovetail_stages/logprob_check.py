"""LogProbCheck: checks whether rollout and trainer compute the same policy, and names the cause if they differ.

If they differ, importance ratios are wrong, and training fails without an error. The check compares the log-probabilities
that both give to the generated tokens, before any weight changes, and judges the mean of
|p_train − p_rollout|: below 0.005 is usual, above 0.01 is more than kernels and rounding normally explain.

**Truncation.** Under top-p or top-k the sampler's distribution is not the full softmax: log p_rollout = log p − log Z
with Z ≤ 1 the mass that was kept. That is not a fault, and must not stop a healthy run. With top-p alone Z ≥ top_p,
so rollout log-probabilities may be higher by up to −log top_p; with top-k by any amount. The check allows for that much and judges
the rest. The allowance also hides errors that raise the rollout's log-probabilities: the check then sees only the tokens at which an
error lowers them. If the engine also gives `raw_rollout_log_probs`, which are of the full softmax, the check compares these with the
trainer's too, without an allowance, and sees errors in both directions.

Legend: N samples, T response tokens, packed end to end; K of them masked in and finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, NumericsError
from dovetail.interfaces import ON_REQUEST, PlanFacts, PluginConfig, Stage, StepContext
from dovetail.metrics import Last, Max, Mean, Metric, Sum, values
from dovetail.sections import LogProbCheckSection, RolloutSection
from dovetail_stages.algorithm import rollout_is_old
from dovetail_stages.logprob_cause import Cause, diagnose
from dovetail_stages.logprob_comparison import Comparison
from dovetail_stages.numerics.finite import sample_names

USUAL = 0.005
"""Mean probability difference that engines normally stay below."""
NAMED = 16
"""Maximum number of samples that a `LogProbComparison` names, those that differ most first."""

Level = Literal["ok", "warn", "stop"]


class LogProbCheck(Stage):
    """Compares the log-probabilities of rollout and trainer.

    The stage runs in every step whose batch has both. If the actor does not score every batch, it scores a few samples for the
    comparison, on the schedule of `algorithm.logprob_check`.
    """

    name = "logprob_check"
    api = ">=1.0,<2"
    phase = "check"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"response_mask"} | ({"old_log_probs"} if _actor_scores(facts) else set()))

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if not comparable(facts):
            return None
        every = facts.config.algorithm.logprob_check.every
        often = f"at step 1 and every {every} steps" if every else "with the log-probabilities"
        return f"rollout and trainer must agree; {often}"

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return () if _actor_scores(facts) else ("actor",)

    def asks(self, number: int, facts: PlanFacts) -> frozenset[str]:
        section = facts.config.algorithm.logprob_check
        return comparable(facts) if due(number, section) else frozenset()

    def skips(self, batch: Batch, step: StepContext) -> bool:
        scheduled = bool(self.asks(step.number, step.facts))
        return "rollout_log_probs" not in batch or not (_actor_scores(step.facts) or scheduled)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        section = step.config.algorithm.logprob_check
        compared = batch.take(generated_rows(batch))
        if allowed := step.facts.age:
            compared = compared.take(~stale_rows(compared, step.weight_version, allowed))
        if not len(compared):
            return batch
        if _actor_scores(step.facts):
            log_probs = compared["old_log_probs"]
        else:
            compared = compared.take(chosen_rows(compared["response_mask"], section.samples))
            scored = step.roles["actor"].forward(compared, frozenset({"log_probs"})).result()
            log_probs = scored["log_probs"]
        verdict = measure(
            compared,
            log_probs,
            sampling=step.config.rollout,
            section=section,
            weight_version=step.weight_version,
        )
        step.metrics |= values(verdict.metrics)
        if verdict.message:
            log = step.logger.info if verdict.level == "ok" else step.logger.warning
            log(verdict.message, step=step.number, cause=verdict.cause, hint=verdict.hint)
        verdict.check()
        return batch


def comparable(facts: PlanFacts) -> frozenset[str]:
    """Return the columns that the rollout engine can provide for the check; empty if there is no engine or it lacks log-probabilities."""
    rollout = facts.plugins.get("rollout")
    capabilities = frozenset() if rollout is None else rollout.cls.capabilities
    if "logprobs" not in capabilities:
        return frozenset()
    return frozenset(column for column, needed in ON_REQUEST.items() if needed in capabilities)


def _actor_scores(facts: PlanFacts) -> bool:
    """Return whether every step has the actor's own log-probabilities of the whole batch."""
    return "old_log_probs" in facts.required and not rollout_is_old(facts)


@attrs.frozen(kw_only=True)
class LogProbComparison:
    """The result of the log-probability check.

    Attributes:
        level: `stop` if the difference is above the bound `stop_above`, or a log-probability is not finite and this bound is set; `warn` if
            the difference is above `warn_above`, a token is stale, or a log-probability is not finite; else `ok`.
        metrics: by name, each with the prefix `logprob_check/`. `prob_diff_mean` and `prob_diff_max` are of |p_train − p_rollout|.
            `log_prob_diff_mean` is of log p_rollout − log p_train. `correlation` is Pearson's, between the two probabilities. `tokens` is
            the number of compared tokens. Three metrics may be absent: `raw_prob_diff_mean` needs log-probabilities of the engine's full
            softmax, `unexplained_diff_mean` needs top-p or top-k, and `stale_tokens` needs a check of weight versions.
        cause: the cause of the difference; None if the level is `ok` and the difference is within `warn_above` without any allowance. At
            level `ok` the cause is otherwise `sampling_transform`: top-p or top-k explains the difference.
        message: the full message; empty if there is no cause.
        hint: the fix.
        sample_ids: the samples that differ most; empty at level `ok`.
    """

    level: Level
    metrics: Mapping[str, Metric]
    cause: Cause | None = None
    message: str = ""
    hint: str | None = None
    sample_ids: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise an error if the level is `stop`.

        Raises:
            NumericsError: the level is `stop`; carries the samples that differ most.
        """
        if self.level == "stop":
            raise NumericsError(self.message, hint=self.hint, sample_ids=self.sample_ids)


def due(step: int, section: LogProbCheckSection) -> bool:
    """Return whether the check is scheduled at this step, counted from 1; the trainer then scores samples for the check if needed."""
    return section.every > 0 and (step == 1 or step % section.every == 0)


def generated_rows(batch: Batch) -> np.ndarray:
    """Return which samples the rollout generated, bool [N]; samples that a stage added have tokens of weight version −1."""
    versions, mask = batch["token_weight_versions"], batch["response_mask"]
    return versions.with_values((versions.values < 0) & mask.values).sum() == 0


def stale_rows(batch: Batch, weight_version: int, allowed: int) -> np.ndarray:
    """Return which samples the check leaves out because they have tokens of older weights, as the trainer allows, bool [N].

    Args:
        batch: N samples.
        weight_version: the current version of the weights.
        allowed: the largest age that the trainer allows, in versions.

    Returns:
        bool [N]; True if a token's weights are older than the current ones, and no token's by more than `allowed` versions. Samples
        with tokens of still older weights are False, so that the check warns about them.
    """
    versions: Ragged = batch["token_weight_versions"]
    # Tokens that the policy did not produce have version −1; their age counts as 0.
    age_T = np.where(versions.values < 0, 0, weight_version - versions.values)
    meant_N = versions.with_values((age_T > 0) & (age_T <= allowed)).sum() > 0
    older_N = versions.with_values(age_T > allowed).sum() > 0
    return meant_N & ~older_N


def chosen_rows(response_mask: Ragged, samples: int) -> np.ndarray:
    """Return the rows of the samples that the trainer scores for the check, int64 [M], spread evenly and in order.

    Args:
        response_mask: bool, ragged [T], of the batch; rows without a masked-in token are skipped.
        samples: the maximum number of samples.
    """
    filled = np.flatnonzero(response_mask.sum() > 0)
    count = min(samples, len(filled))
    return filled[np.arange(count) * len(filled) // max(count, 1)]


def measure(
    batch: Batch,
    log_probs: Ragged,
    *,
    sampling: RolloutSection,
    section: LogProbCheckSection,
    weight_version: int | None = None,
) -> LogProbComparison:
    """Compare the rollout's log-probabilities with the trainer's.

    Args:
        batch: N samples; needs `response_mask` and `rollout_log_probs`. Reads `raw_rollout_log_probs`,
            `token_weight_versions`, `temperature` and `sample_id` if present.
        log_probs: float32, ragged [T], nats, of the same rows by the trainer: full softmax of logits / temperature.
        sampling: the sampling settings of the rollout.
        section: the config `algorithm.logprob_check`, with the bounds.
        weight_version: the trainer's version of the weights. Tokens of another version are stale and cause a warning,
            however small the difference. None if other versions are expected, as in asynchronous training.

    Raises:
        ColumnError: a column is missing, or does not line up with `response_mask`.
    """
    batch.require(("response_mask", "rollout_log_probs"), "the log-probability check")
    found, broken_rows = _compare(batch, log_probs, sampling, weight_version)
    broken = len(broken_rows)
    metrics = _metrics(found, weight_version is not None)
    judged = found.judged
    level: Level = "ok"
    if section.stop_above is not None and (judged > section.stop_above or broken):
        level = "stop"
    elif judged > section.warn_above or found.stale_K.any() or broken:
        level = "warn"
    if level == "ok" and found.mean(found.gap_K) <= section.warn_above:
        return LogProbComparison(level=level, metrics=metrics)
    finding = diagnose(found, sampling, section.warn_above, weight_version, broken)
    worst: list[int] = []
    if level != "ok":
        worst = [*broken_rows.tolist(), *found.worst_rows().tolist()]
    return LogProbComparison(
        level=level,
        metrics=metrics,
        cause=finding.cause,
        message=f"{_figures(found, section, level)}; {finding.cause}: {finding.text}",
        hint=finding.hint,
        sample_ids=sample_names(batch, list(dict.fromkeys(worst))[:NAMED]),
    )


def _compare(
    batch: Batch, log_probs: Ragged, sampling: RolloutSection, weight_version: int | None
) -> tuple[Comparison, np.ndarray]:
    """Return the comparison of the masked-in tokens whose log-probabilities are finite in both rollout and trainer, and the row of the
    sample of every other masked-in token.
    """
    mask: Ragged = batch["response_mask"]
    columns = {
        "the trainer's log_probs": log_probs,
        "rollout_log_probs": batch["rollout_log_probs"],
    }
    for name in ("raw_rollout_log_probs", "token_weight_versions"):
        if name in batch:
            columns[name] = batch[name]
    for name, column in columns.items():
        if not np.array_equal(column.offsets, mask.offsets):
            raise ColumnError(
                f"{name} of the log-probability check do not line up with response_mask: {len(column.values)} values "
                f"over {len(column)} samples; the mask has {len(mask.values)} values over {len(mask)}",
                hint="give one value for each response token of the same rows",
            )
    train_T, rollout_T = (column.values for column in list(columns.values())[:2])
    finite_T = np.isfinite(train_T) & np.isfinite(rollout_T)
    chosen = np.flatnonzero(mask.values & finite_T)
    raw = columns.get("raw_rollout_log_probs")
    versions = columns.get("token_weight_versions")
    found = Comparison.of(
        train_K=train_T[chosen].astype(np.float64),
        rollout_K=rollout_T[chosen].astype(np.float64),
        raw_K=None if raw is None else raw.values[chosen].astype(np.float64),
        version_K=None if versions is None else versions.values[chosen],
        row_K=mask.row_index[chosen],
        temperature_N=batch.columns.get("temperature"),
        weight_version=weight_version,
        sampling=sampling,
    )
    return found, mask.row_index[mask.values & ~finite_T]


def _metrics(found: Comparison, versions: bool) -> dict[str, Metric]:
    tokens = len(found.train_K)

    def mean(values_K: np.ndarray) -> Mean:
        return Mean(float(values_K.sum()), tokens)

    metrics: dict[str, Metric] = {
        "logprob_check/prob_diff_mean": mean(found.gap_K),
        "logprob_check/prob_diff_max": Max(float(found.gap_K.max(initial=0.0))),
        "logprob_check/log_prob_diff_mean": mean(found.rollout_K - found.train_K),
        "logprob_check/correlation": Last(found.correlation),
        "logprob_check/tokens": Sum(tokens),
    }
    if found.raw_gap_K is not None:
        metrics["logprob_check/raw_prob_diff_mean"] = mean(found.raw_gap_K)
    if found.truncated:
        metrics["logprob_check/unexplained_diff_mean"] = Mean(found.judged * tokens, tokens)
    if versions:
        metrics["logprob_check/stale_tokens"] = Sum(int(np.count_nonzero(found.stale_K)))
    return metrics


def _figures(found: Comparison, section: LogProbCheckSection, level: Level) -> str:
    """Return the part of the message that gives the mean difference, and the bound that the difference exceeds, if any."""
    tokens = f"{len(found.train_K):,} tokens"
    mean = found.mean(found.gap_K)
    text = f"rollout and trainer: the mean of |p_train − p_rollout| over {tokens} is {mean:.4f}"
    if found.truncated:
        text += f", {found.judged:.4f} of it beyond what top-p and top-k explain"
    for name, bound in (("stop_above", section.stop_above), ("warn_above", section.warn_above)):
        if level != "ok" and bound is not None and found.judged > bound:
            return f"{text}, above algorithm.logprob_check.{name} = {bound:g} (below {USUAL:g} is usual)"
    return text
