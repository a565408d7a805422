"""SglangRollout: the rollout engine on SGLang."""

from __future__ import annotations

from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.engine_args import may_start_empty
from dovetail_serving import Backend, ServingRollout


class SglangRollout(ServingRollout):
    """Rollout engine on one SGLang server.

    SGLang returns log-probabilities under the full softmax of logits / temperature, before top-p and top-k. With top-k,
    log-probabilities under the sampling distribution are computed from the k most likely tokens.
    """

    name = "sglang"
    api = ">=1.1,<2"
    engine = "SGLang"
    log_probs = "raw"
    capabilities = frozenset(
        {
            "logprobs",
            "raw_logprobs",
            "scores",
            "sleep",
            "discards_weights",
            "lora",
            "tensor_parallel",
            "server",
        }
    )
    Config = SglangRolloutConfig

    def make_backend(self) -> Backend:
        from dovetail_rollout_sglang.backend import SglangBackend

        return SglangBackend(self.config, self.context)

    def starts_empty(self) -> bool:
        return may_start_empty(self.config, self.context)
