"""Config classes of the package's plugins. Nothing here imports more than the config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, NOT_NEGATIVE, PluginSection, Validator, plugin_field

DEFAULT = "default"
"""Stands for every `data_source` that is not named."""
_NEGATIVE: Validator = attrs.validators.optional(attrs.validators.lt(0))


@attrs.frozen(kw_only=True)
class ServeSection:
    """Servers that the run starts for a teacher, in processes of the runtime beside those of training and rollout."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """What serves it."""
    replicas: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Servers; a request goes to the one with the fewest."""
    accelerators: int = attrs.field(default=1, validator=NOT_NEGATIVE)
    """Accelerators of each, over which its model is divided by tensor parallelism, beside those of the pools; 0: on CPUs."""
    cpus: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """CPUs that each reserves."""
    python: str | None = None
    """Interpreter with vLLM, or with dovetail-rollout-sglang and SGLang; None: that of the runtime's processes."""
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of `vllm serve`, such as `{max_model_len: 4096}`, or of SGLang's server, such as `{context_length: 4096}`."""
    start_timeout: float = attrs.field(default=1200.0, validator=ABOVE_ZERO)
    """Seconds until all of them have loaded the model."""


@attrs.frozen(kw_only=True)
class EndpointSection:
    """A teacher behind servers with vLLM's `/v1/completions`: one that runs (`url`), or those that the run starts (`serve`)."""

    url: str | None = None
    """Address before `/v1`, such as `http://127.0.0.1:8000`."""
    serve: ServeSection | None = None
    """Servers to start."""
    model: str
    """The name under which the server has it; of servers to start, the model's directory or hub id."""
    auth_env: str | None = None
    """Environment variable that holds the server's key."""
    concurrency: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Requests at a time; a request is a sample."""
    timeout: float = attrs.field(default=120.0, validator=ABOVE_ZERO)
    """Seconds for one request."""
    retries: int = attrs.field(default=3, validator=NOT_NEGATIVE)
    """Further tries of a request after which another may do: no connection, no answer in time, a busy server, or one that has died."""

    def __attrs_post_init__(self) -> None:
        """Refuse a teacher that is nowhere, or in two places."""
        if (self.url is None) == (self.serve is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(f"a served teacher has a url or serve, and {given} is set; give one")


@attrs.frozen(kw_only=True)
class ScoreTeacherConfig(PluginSection):
    """Selects the teacher that scores each sample."""

    teachers: Mapping[str, str] = attrs.field(factory=dict)
    """By `data_source` of the row: a role of `roles`, or a name of `endpoints`; `default` for all others. Empty: the role `teacher` for all."""
    endpoints: Mapping[str, EndpointSection] = attrs.field(factory=dict)
    """Teachers that are served, by name."""

    @property
    def by_source(self) -> Mapping[str, str]:
        """The teacher of each `data_source`, and of `default`."""
        return self.teachers or {DEFAULT: "teacher"}


@attrs.frozen(kw_only=True)
class TeacherAdvantageConfig(PluginSection):
    """Advantages from the teacher's log-probabilities."""

    coef: float = 1.0
    """Weight of log π_teacher − log π_old."""
    reward_coef: float = 1.0
    """Weight of the estimator's advantages; 0 leaves the rewards out."""
    min_log_prob: float | None = attrs.field(default=None, validator=_NEGATIVE)
    """Log-probabilities of both below it, such as -10, count as it: a token that one holds for impossible does not decide a step."""
    max_divergence: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Bound of the log-ratio of a token in nats, such as 10, on both sides."""


@attrs.frozen(kw_only=True)
class DistillConfig(PluginSection):
    """A divergence between teacher and student at each token."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "k1+", "k2", "k3", "k3+"] = "forward_kl"
    """`forward_kl`, `reverse_kl` and `jsd` compare the teacher's `top_k` words; the others estimate the reverse KL from the
    token alone."""
    top_k: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Words of the teacher that are compared at each token."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """All other words: one more word with what probability is left, or left out, both sides being normalised without them."""
    beta: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Weight of the teacher in the mixture of `jsd`."""
    min_log_prob: float | None = attrs.field(default=None, validator=_NEGATIVE)
    """Log-probabilities of both below it, such as -10, count as it, and get no gradient."""
    max_divergence: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Bound of the divergence of a token in nats, such as 10, on both sides; beyond it a token gets no gradient."""
    coef: float = 1.0
    """Weight of the divergence."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """How the divergences of tokens become one number."""
    plus: PluginSection | None = plugin_field("objective", None)
    """A further objective whose loss is added, such as `policy` or `nll`; absent: there is none."""
