"""Config classes of the package's plugins. This module imports nothing but config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, NOT_NEGATIVE, PluginSection, Validator, plugin_field

DEFAULT = "default"
"""Key for every `data_source` that has no key of its own."""
_NEGATIVE: Validator = attrs.validators.optional(attrs.validators.lt(0))


@attrs.frozen(kw_only=True)
class ServeSection:
    """Servers that the run starts for a teacher, each in a process of its own that the runtime starts."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """The engine of the servers."""
    replicas: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """The number of servers; a request goes to the server with the fewest running requests."""
    accelerators: int = attrs.field(default=1, validator=NOT_NEGATIVE)
    """Accelerators per server, in addition to those of the run's roles; tensor parallelism divides the model over them. 0: run on CPUs."""
    cpus: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """CPUs that each server reserves."""
    python: str | None = None
    """Python interpreter of an environment with vLLM, or with SGLang and dovetail-rollout-sglang; None: that of the runtime's processes."""
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of `vllm serve`, such as `{max_model_len: 4096}`, or of SGLang's server, such as `{context_length: 4096}`."""
    start_timeout: float = attrs.field(default=1200.0, validator=ABOVE_ZERO)
    """Seconds within which all servers must have loaded the model."""


@attrs.frozen(kw_only=True)
class EndpointSection:
    """A teacher behind vLLM's `/v1/completions`: a running server (`url`), or servers that the run starts (`serve`)."""

    url: str | None = None
    """Address of the running server, without `/v1`, such as `http://127.0.0.1:8000`."""
    serve: ServeSection | None = None
    """The servers to start, in place of `url`."""
    model: str
    """The model's name at the server; for servers that the run starts, the model's directory or hub id."""
    auth_env: str | None = None
    """Environment variable that holds the server's key."""
    concurrency: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Maximum concurrent requests, one per sample."""
    timeout: float = attrs.field(default=120.0, validator=ABOVE_ZERO)
    """Limit in seconds for one request."""
    retries: int = attrs.field(default=3, validator=NOT_NEGATIVE)
    """Retries of a request after a failed connection, a time-out, or an answer of a busy or dead server."""

    def __attrs_post_init__(self) -> None:
        """Require either `url` or `serve`."""
        if (self.url is None) == (self.serve is None):
            given = "neither `url` nor `serve`" if self.url is None else "both `url` and `serve`"
            raise ValueError(
                f"the teacher's endpoint has {given}; expected exactly one: `url` for a running server, or `serve` to start servers"
            )


@attrs.frozen(kw_only=True)
class ScoreTeacherConfig(PluginSection):
    """Selects the teacher that scores each sample."""

    teachers: Mapping[str, str] = attrs.field(factory=dict)
    """The teacher for each `data_source` of the rows: a role of `roles`, or a name of `endpoints`. The key `default` stands for all other
    data sources. Empty: the role `teacher` scores all rows.
    """
    endpoints: Mapping[str, EndpointSection] = attrs.field(factory=dict)
    """Teachers behind servers, by name."""

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
    """Floor of the teacher's and the old policy's log-probabilities, such as -10, so that a token that one model finds impossible does not
    dominate a step.
    """
    max_divergence: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Bound of each token's |log π_teacher − log π_old| in nats, such as 10; values beyond it are clipped."""


@attrs.frozen(kw_only=True)
class DistillConfig(PluginSection):
    """A divergence between teacher and student at each token."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "k1+", "k2", "k3", "k3+"] = "forward_kl"
    """`forward_kl`, `reverse_kl` and `jsd` compare the teacher's `top_k` most likely words; the others estimate the reverse KL from the
    sampled token alone. `k1+` and `k3+` have the values of the estimates k1 and k3, and the gradient of k2.
    """
    top_k: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Number of the teacher's most likely words (vocabulary tokens) that are compared at each token."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """Treatment of all other words: `bucket` counts them as one word with the remaining probability; `renormalize` drops them and
    rescales both distributions to sum to 1.
    """
    beta: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Weight of the teacher in the mixture of `jsd`."""
    min_log_prob: float | None = attrs.field(default=None, validator=_NEGATIVE)
    """Floor of the teacher's and the student's log-probabilities, such as -10; values below it get no gradient."""
    max_divergence: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Bound of a token's absolute divergence in nats, such as 10; beyond it a token gets no gradient."""
    coef: float = 1.0
    """Weight of the divergence."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """Aggregation of the tokens' divergences into one number."""
    plus: PluginSection | None = plugin_field("objective", None)
    """A further objective whose loss is added, such as `policy` or `nll`; absent: none."""
