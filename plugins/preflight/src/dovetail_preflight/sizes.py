"""Rules about sizes that do not fit one another: lengths, budgets of micro-batches, and warm-ups."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces import Finding
from dovetail.planning import Plan, generates, has_critic
from dovetail.sections import ModelSection, RunConfig
from dovetail_datasets import model_directory, text_config


def rollout_too_short(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if the model or the engine accepts fewer tokens than the longest prompt and response together.

    Otherwise, the engine would refuse the longest prompts in the middle of the run, or cut off their responses. A model's limit is
    `max_position_embeddings` of its config.json, times the factor of rope scaling; some models have no limit. A model that is not on
    this machine is checked only by the engine, at its start.
    """
    prompt, (key, response) = config.data.max_prompt_length, _longest_response(config)
    needed = prompt + response
    sample = f"data.max_prompt_length + {key} = {prompt} + {response} = {needed}"
    if config.data.max_length is not None:
        needed = config.data.max_length
        sample = f"data.max_length = {needed}"
    length: int | None = getattr(config.rollout, "max_model_len", None)
    length = length if generates(config) else None
    positions, where = _positions(config.model)
    if positions is not None and positions < needed:
        shorter = f"set data.max_prompt_length= and {key}= to at most {positions} together"
        if config.data.max_length is not None:
            shorter = f"set data.max_length={positions} or less"
        elif prompt < positions:
            shorter = f"set {key}={positions - prompt} or less"
        yield Finding.error(
            f"model.path = {config.model.path} takes at most {positions} tokens ({where}), which is too short for one sample: {sample}",
            hint=f"{shorter}, choose a model that takes longer samples, or, to train a model with rotary positions on longer samples, set "
            f"model.override_config.max_position_embeddings={needed}",
        )
    elif length is not None and length < needed:
        yield Finding.error(
            f"rollout.max_model_len = {length} is too short for one sample: {sample}",
            hint=f"set rollout.max_model_len={needed} or more, or leave it out",
        )


def _longest_response(config: RunConfig) -> tuple[str, int]:
    """Return the longest allowed response in tokens, in training or validation, and the key that sets it."""
    response = config.data.max_response_length
    validation = config.rollout.validation.max_response_length or 0
    if config.data.val_files and validation > response:
        return "rollout.validation.max_response_length", validation
    return "data.max_response_length", response


def _positions(section: ModelSection) -> tuple[int | None, str]:
    """Return a model's maximum number of tokens, and a text that says where it is set; None and "" if it is unknown."""
    from dovetail_datasets import max_positions

    directory = model_directory(section.path, section)
    text = text_config(directory, section) if directory is not None else None
    positions = max_positions(text)
    if directory is None or text is None or positions is None:
        return None, ""
    scaled = "" if positions == text.max_position_embeddings else " with rope scaling"
    stated = f"max_position_embeddings = {text.max_position_embeddings}{scaled}"
    overridden = "max_position_embeddings" in section.override_config
    return (
        positions,
        f"{stated} in {'model.override_config' if overridden else directory / 'config.json'}",
    )


def token_budget(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if the critic's micro-batches are too small for the longest sample.

    The budgets of actor and reference are checked when the config is loaded. The critic's budget matters only if the run has a critic.
    """
    longest, keys = config.data.longest
    budget = config.critic.max_tokens_per_micro_batch
    if has_critic(plan) and budget < longest:
        yield Finding.error(
            f"critic.max_tokens_per_micro_batch = {budget} is too small for one sequence: {keys}",
            hint=f"set critic.max_tokens_per_micro_batch={longest} or more",
        )


def warmup_too_long(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a learning-rate warm-up is at least as long as the run; for a warm-up of the critic, report an error.

    With such a learning-rate warm-up, the learning rate never reaches its configured value. With such a critic warm-up, the policy is
    never trained.
    """
    if plan is None or plan.counts.steps is None:
        return
    steps = plan.counts.steps
    if has_critic(plan) and config.critic.warmup_steps >= steps:
        yield Finding.error(
            f"critic.warmup_steps = {config.critic.warmup_steps}, but the run has {steps} {'step' if steps == 1 else 'steps'}: "
            "every step would train only the critic, and the policy would never be trained",
            hint=f"set critic.warmup_steps={steps // 10}, or give the run more steps (trainer.total_steps)",
        )
        return
    for model in plan.models:
        optim, updates = model.training.optim, plan.total_updates(model.role)
        if model.trained and updates and optim.warmup_steps >= updates:
            steps_there = "1 optimizer step" if updates == 1 else f"{updates} optimizer steps"
            yield Finding.warning(
                f"{model.key}.optim.warmup_steps = {optim.warmup_steps}, but the run has {steps_there} of "
                f"the {model.role}: the learning rate never reaches {model.key}.optim.lr = {optim.lr:g}",
                hint=f"set {model.key}.optim.warmup_steps={updates // 10}",
            )


def long_penalty_buffer(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the buffer of the overlong penalty is as long as the longest response; if it is longer, report an error.

    DAPO's penalty (arXiv 2503.14476, eq. 13) is meant for the last part of the length limit. A buffer as long as the limit penalises every
    token of a response, and a longer buffer penalises even an empty response.
    """
    penalty, longest = config.algorithm.overlong_penalty, config.data.max_response_length
    if penalty is None or not penalty.factor or penalty.buffer < longest:
        return
    message = f"algorithm.overlong_penalty.buffer = {penalty.buffer} is not below data.max_response_length = {longest}"
    hint = f"set algorithm.overlong_penalty.buffer={max(1, longest // 4)}"
    if penalty.buffer > longest:
        yield Finding.error(f"{message}: even an empty response is penalised", hint=hint)
    else:
        yield Finding.warning(f"{message}: every token of a response is penalised", hint=hint)
