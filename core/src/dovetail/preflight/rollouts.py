"""Rules about rollout engines and their model: too short for a sample, more ranks than divide the model, sleep that frees nothing."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.errors import ConfigError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.media.models import text_config
from dovetail.planning.plan import Plan
from dovetail.preflight.models import model_directory
from dovetail.preflight.selected import generates
from dovetail.sections import ModelSection, RunConfig


class RolloutTooShort(PreflightRule):
    """The model, or the engine, takes fewer tokens than the longest prompt and response together.

    The longest prompts would be refused in the middle of the run, or their responses cut off. A model's limit is
    `max_position_embeddings` of its config.json, with rope scaling times its factor; some models have none. A model that is not
    on this machine is left to the engine to judge.
    """

    name = "rollout_too_short"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        prompt, (key, response) = config.data.max_prompt_length, _longest_response(config)
        sample = f"data.max_prompt_length + {key} = {prompt} + {response} = {prompt + response}"
        length: int | None = getattr(config.rollout, "max_model_len", None)
        length = length if generates(config) else None
        positions, where = _positions(config.model)
        if positions is not None and positions < prompt + response:
            shorter = (
                f"set {key}={positions - prompt} or less"
                if prompt < positions
                else f"set data.max_prompt_length= and {key}= to at most {positions} together"
            )
            yield self.error(
                f"model.path = {config.model.path} takes {positions} tokens ({where}), which is too short for one sample: {sample}",
                hint=f"{shorter}, or choose a model that takes longer samples",
            )
        elif length is not None and length < prompt + response:
            yield self.error(
                f"rollout.max_model_len = {length} is too short for one sample: {sample}",
                hint=f"set rollout.max_model_len={prompt + response} or more, or leave it out",
            )


class RolloutLayout(PreflightRule):
    """A replica of a serving engine is to have more ranks than divide the model's heads, or its experts.

    The model's config in its directory tells; the engine would say so minutes later, on its accelerators.
    """

    name = "rollout_layout"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.serving.division import refuse_indivisible
        from dovetail.serving.section import ServingSection

        rollout = config.rollout
        if not isinstance(rollout, ServingSection) or rollout.joined or not generates(config):
            return
        spread = getattr(rollout, "expert_parallel_size", None) or 1
        try:
            refuse_indivisible(config.model, ranks=rollout.attention_ranks(), spread=spread)
        except ConfigError as error:
            yield self.error(error.message, hint=error.hint)


class OffloadFreesNothing(PreflightRule):
    """The rollout is to sleep between rollouts, and computes on CPUs, where engines free nothing in sleep."""

    name = "offload_frees_nothing"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or not config.rollout.offload or config.rollout.joined:
            return
        if not plan.generates:
            return
        if plan.device_of("rollout") == "cpu":
            yield self.warning(
                "rollout.offload = true, and the rollout computes on the CPU here: its sleep frees no memory, and takes time",
                hint="set rollout.offload=false: it is for accelerators that trainer and rollout share",
            )


def _longest_response(config: RunConfig) -> tuple[str, int]:
    """How many tokens a response may have, in training or validation, and the key that says so."""
    response = config.data.max_response_length
    validation = config.rollout.validation.max_response_length or 0
    if config.data.val_files and validation > response:
        return "rollout.validation.max_response_length", validation
    return "data.max_response_length", response


def _positions(section: ModelSection) -> tuple[int | None, str]:
    """How many tokens a model takes, None where nothing here says so; and where that stands."""
    from dovetail.serving.facts import max_positions

    directory = model_directory(section.path, section)
    text = text_config(directory, section) if directory is not None else None
    positions = max_positions(text)
    if directory is None or text is None or positions is None:
        return None, ""
    scaled = "" if positions == text.max_position_embeddings else " with rope scaling"
    stated = f"max_position_embeddings = {text.max_position_embeddings}{scaled}"
    return positions, f"{stated} in {directory / 'config.json'}"
