"""Rules about sizes that do not fit one another: budgets, warm-ups, buffers."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.sections import RunConfig


class TokenBudget(PreflightRule):
    """A micro-batch of the critic is too small for the longest sample.

    The actor's and the reference's budgets are checked with the config; the critic's counts only where there is one.
    """

    name = "token_budget"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
        budget = config.critic.max_tokens_per_micro_batch
        if has_critic(plan) and budget < prompt + response:
            yield self.error(
                f"critic.max_tokens_per_micro_batch = {budget} is too small for one sequence: "
                f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response}",
                hint=f"set critic.max_tokens_per_micro_batch={prompt + response} or more",
            )


class WarmupTooLong(PreflightRule):
    """A warm-up that is not over when the run is.

    The learning rate never reaches the value that the config names; or, where the critic's warm-up is meant, the
    policy is never trained at all.
    """

    name = "warmup_too_long"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or plan.counts.steps is None:
            return
        steps = plan.counts.steps
        if has_critic(plan) and config.critic.warmup_steps >= steps:
            yield self.error(
                f"critic.warmup_steps = {config.critic.warmup_steps} of the run's {steps} "
                f"{'step' if steps == 1 else 'steps'} train the critic "
                "alone: the policy is never trained",
                hint=f"set critic.warmup_steps={steps // 10}, or give the run more steps (trainer.total_steps)",
            )
            return
        for model in plan.models:
            optim, updates = model.training.optim, plan.total_updates(model.role)
            if model.trained and updates and optim.warmup_steps >= updates:
                steps_there = "1 optimizer step" if updates == 1 else f"{updates} optimizer steps"
                yield self.warning(
                    f"{model.key}.optim.warmup_steps = {optim.warmup_steps}, but the run has {steps_there} of "
                    f"the {model.role}: the learning rate only ever rises, towards {model.key}.optim.lr = {optim.lr:g}",
                    hint=f"set {model.key}.optim.warmup_steps={updates // 10}",
                )


class LongPenaltyBuffer(PreflightRule):
    """The overlong penalty's buffer is as long as the longest response: no response is short enough to go free.

    DAPO's penalty (arXiv 2503.14476, eq. 13) is meant for the last part of the length limit. A buffer of the whole
    limit or more makes it a penalty on every token of every response.
    """

    name = "long_penalty_buffer"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        penalty, longest = config.algorithm.overlong_penalty, config.data.max_response_length
        if penalty is None or not penalty.factor or penalty.buffer < longest:
            return
        message = f"algorithm.overlong_penalty.buffer = {penalty.buffer} is not below data.max_response_length = {longest}"
        hint = f"set algorithm.overlong_penalty.buffer={max(1, longest // 4)}"
        if penalty.buffer > longest:
            yield self.error(f"{message}: even an empty response is penalised", hint=hint)
        else:
            yield self.warning(f"{message}: every token of a response is penalised", hint=hint)


def has_critic(plan: Plan | None) -> bool:
    """Whether a step needs a value model."""
    return plan is not None and any(model.role == "critic" for model in plan.models)
