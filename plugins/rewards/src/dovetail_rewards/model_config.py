"""Config classes of the reward models. Nothing here imports more than the config sections."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, VERBATIM, PluginSection


@attrs.frozen(kw_only=True)
class ScoringModelConfig(PluginSection):
    """A model of transformers that scores responses in this process."""

    model: str
    """A directory in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer_path: str | None = None
    """Its tokenizer, where it lies elsewhere."""
    trust_remote_code: bool = False
    """Run Python code that the model repository ships."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the model's weights and computation; the score is float32."""
    attn_implementation: str = "sdpa"
    """transformers' attention implementation."""
    device: str | None = None
    """torch's name of where it computes, such as `cpu` or `cuda:3`; None takes the accelerator that this process has, else the CPU."""
    offload: bool = False
    """Keep it off the accelerator between rollouts, in host memory."""
    chat_template: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """A Jinja chat template, or the path of a file that holds one; replaces its tokenizer's own."""
    max_length: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Most tokens of prompt and response; None takes the most that the model has positions for."""
    max_tokens_per_batch: int = attrs.field(default=16384, validator=AT_LEAST_ONE)
    """Token budget of one forward pass, padding included; a longer text has a pass to itself."""
    size: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Most samples in a forward pass."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for others before a pass is made with fewer."""


@attrs.frozen(kw_only=True)
class RewardModelConfig(ScoringModelConfig):
    """A discriminative reward model: a sequence classifier with one label reads prompt and response, and its logit is the score."""

    format: Literal["chat", "pair"] = "chat"
    """chat: prompt and response as a conversation in its chat template; pair: as its tokenizer's two segments, as encoders want them."""
    overlong: Literal["fail", "keep_end", "keep_start"] = "fail"
    """Longer texts: fail the sample, or lose tokens at the other end, which the component `truncated` then counts."""
    mean: float = 0.0
    """Subtracted from the logit."""
    std: float = attrs.field(default=1.0, validator=ABOVE_ZERO)
    """What it is then divided by."""
    clip: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Largest absolute score; None for any."""


@attrs.frozen(kw_only=True)
class ProcessRewardModelConfig(ScoringModelConfig):
    """A process reward model: it says of every step of a response how likely it is right."""

    head: Literal["classifier", "language_model"] = "classifier"
    """classifier: a token classifier of two labels, of which the second says right, or of one; language_model: how likely `positive` follows, beside
    `negative`."""
    positive: str = attrs.field(default="+", metadata={VERBATIM: True})
    """What a language model says of a right step: the last token of this text."""
    negative: str = attrs.field(default="-", metadata={VERBATIM: True})
    """What it says of a wrong one."""
    format: Literal["chat", "plain"] = "chat"
    """chat: prompt and steps as a conversation in its chat template; plain: the prompt's text, a space, and the steps."""
    step_separator: str = attrs.field(
        default="\n\n", validator=attrs.validators.min_len(1), metadata={VERBATIM: True}
    )
    """What stands between two steps of a response."""
    step_token: str = attrs.field(
        default="<extra_0>", validator=attrs.validators.min_len(1), metadata={VERBATIM: True}
    )
    """What is put behind each step for the model: the step is judged at the last token of this text."""
    step_join: str = attrs.field(default="", metadata={VERBATIM: True})
    """What stands between that and the next step."""
    aggregate: Literal["min", "last", "prod", "mean", "sum"] = "min"
    """How the steps make the response's score: the least, the last, the product, the mean or the sum of their probabilities."""
    rewards: Literal["outcome", "steps"] = "outcome"
    """outcome: the score is the reward of the response; steps: the last token of each step is rewarded with what the step adds to the score so far."""
