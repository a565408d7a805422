"""Config classes of the reward models. This module imports nothing but config sections."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, VERBATIM, PluginSection


@attrs.frozen(kw_only=True)
class ScoringModelConfig(PluginSection):
    """Settings of a transformers model that scores responses in this process."""

    model: str
    """A model directory in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer_path: str | None = None
    """Directory or hub id of the tokenizer, if it is not in `model`."""
    trust_remote_code: bool = False
    """Run Python code that the model repository ships."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the model's weights and computation; the score is float32."""
    attn_implementation: str = "sdpa"
    """Attention implementation that transformers uses for the model, such as `sdpa`, `eager` or `flash_attention_2`."""
    device: str | None = None
    """torch device of the model, such as `cpu` or `cuda:3`; None takes this process's accelerator if any, else the CPU."""
    offload: bool = False
    """Keep the model in host memory between rollouts."""
    chat_template: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """A Jinja chat template, or the path of a template file, that replaces the tokenizer's chat template."""
    max_length: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum tokens of prompt and response together; None takes the limit of the model or of its tokenizer, whichever is smaller."""
    max_tokens_per_batch: int = attrs.field(default=16384, validator=AT_LEAST_ONE)
    """Maximum tokens of one forward pass, padding included; a longer text is processed alone."""
    size: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Maximum number of samples in a forward pass."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for further samples before a smaller forward pass is made."""


@attrs.frozen(kw_only=True)
class RewardModelConfig(ScoringModelConfig):
    """Settings of `reward_model`: a sequence classifier with one label, whose logit for prompt and response is the score."""

    format: Literal["chat", "pair"] = "chat"
    """chat: prompt and response as a conversation in the model's chat template; pair: prompt and response as a tokenizer's text pair, for
    encoder models.
    """
    overlong: Literal["fail", "keep_end", "keep_start"] = "fail"
    """Handling of texts that are too long: fail the sample, or keep the text's end or start and set the component `truncated` to 1."""
    mean: float = 0.0
    """Number that is subtracted from the logit before the division by `std`."""
    std: float = attrs.field(default=1.0, validator=ABOVE_ZERO)
    """Number by which the logit less `mean` is divided."""
    clip: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Largest absolute score; None for no limit."""


@attrs.frozen(kw_only=True)
class ProcessRewardModelConfig(ScoringModelConfig):
    """Settings of `process_reward_model`, which gives the probability that each step of a response is right."""

    head: Literal["classifier", "language_model"] = "classifier"
    """classifier: a token classifier with one label, or with two labels (wrong, right); language_model: the probability of `positive`
    relative to `negative` as the next token.
    """
    positive: str = attrs.field(default="+", metadata={VERBATIM: True})
    """Text whose last token, as the next token after a step, means that the step is right. Used with `head: language_model`."""
    negative: str = attrs.field(default="-", metadata={VERBATIM: True})
    """Text whose last token, as the next token after a step, means that the step is wrong. Used with `head: language_model`."""
    format: Literal["chat", "plain"] = "chat"
    """chat: prompt and steps as a conversation in the model's chat template; plain: the prompt's text, a space, and the steps."""
    step_separator: str = attrs.field(
        default="\n\n", validator=attrs.validators.min_len(1), metadata={VERBATIM: True}
    )
    """Text between two steps of a response."""
    step_token: str = attrs.field(
        default="<extra_0>", validator=attrs.validators.min_len(1), metadata={VERBATIM: True}
    )
    """Text that is inserted after each step; the step is judged at this text's last token."""
    step_join: str = attrs.field(default="", metadata={VERBATIM: True})
    """Text between the step token and the next step."""
    aggregate: Literal["min", "last", "prod", "mean", "sum"] = "min"
    """Rule that combines the steps' probabilities into the response's score: the minimum, the last, the product, the mean or the sum."""
    rewards: Literal["outcome", "steps"] = "outcome"
    """outcome: the score is the reward of the response; steps: the last token of each step gets a reward, the score
    of the steps up to this step minus the score of the steps before it.
    """
