"""BaseRollout: one replica of a generation engine, token ids in and out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from enum import StrEnum

import attrs
import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces.media import MediaRef
from dovetail.interfaces.plugin import Plugin
from dovetail.interfaces.transport import WeightManifest
from dovetail.metrics import Metric
from dovetail.random_streams import SampleStream

ON_REQUEST = {"rollout_log_probs": "logprobs", "raw_rollout_log_probs": "raw_logprobs"}
"""Columns that cost generation time, and the capability that a rollout engine needs for each."""


class FinishReason(StrEnum):
    """The reason why a response ended."""

    STOP = "stop"
    """A stop token or stop string was produced (a stop token is part of the response)."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are valid."""


class PauseMode(StrEnum):
    """The treatment of running requests when a replica is paused."""

    ABORT = "abort"
    """Running requests are aborted, and return their tokens so far."""
    WAIT = "wait"
    """Running requests run to their end."""
    KEEP = "keep"
    """Running requests stop, and continue when the replica is resumed. After a weight update, the keys and values of the
    tokens so far are recomputed with the new weights."""
    KEEP_CACHE = "keep_cache"
    """As `KEEP`, but after a weight update the requests keep the keys and values of the old weights. Requests submitted later do not use
    these keys and values. Only engines with the capability `keeps_cache` get this mode."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are sampled, and which log-probabilities (in nats) are returned."""

    max_new_tokens: int
    """Upper bound on produced tokens, stop token included."""
    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass: tokens are drawn from the smallest set of most likely tokens with at least this mass."""
    top_k: int = -1
    """Number of most likely tokens to draw from; -1 means all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    ignore_eos: bool = False
    """Whether to continue past the end-of-sequence token, for benchmarks with fixed lengths."""
    log_probs: bool = False
    """Whether to return log-probabilities under the sampler as used (temperature, top-p, top-k)."""
    raw_log_probs: bool = False
    """Whether to return log-probabilities under the full softmax of logits / temperature."""


@attrs.frozen(kw_only=True, eq=False)
class RolloutRequest:
    """A request to draw one or several samples for a prompt."""

    request_id: str
    """Id of the request, unique among running requests."""
    prompt_ids: np.ndarray
    """int64 [P]: the prompt as the engine sees it."""
    sampling: SamplingParams
    streams: tuple[SampleStream, ...]
    """One random stream for each sample to draw."""
    media: tuple[MediaRef, ...] = ()
    """References to the prompt's images, in the order of their tokens; only engines with the capability `images` get them.
    `prompt_ids` holds each image expanded to the model's number of tokens."""
    priority: int = 0
    """Order in which waiting requests begin: the lowest number first; among equals, the earliest arrival. A waiting request never
    interrupts a running one. An engine without priorities begins requests in their order of arrival."""

    @property
    def n(self) -> int:
        """Number of samples to draw."""
        return len(self.streams)


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One finished sample of a request."""

    request_id: str
    sample: int
    """Index of the sample in the request's `streams`."""
    response_ids: np.ndarray
    """int64 [T]: produced tokens, the stop token included."""
    finish_reason: FinishReason
    weight_versions: np.ndarray
    """int64 [T]: version of the weights that produced each token."""
    log_probs: np.ndarray | None = None
    """float32 [T], nats, under the sampler as used; None unless requested."""
    raw_log_probs: np.ndarray | None = None
    """float32 [T], nats, full softmax of logits / temperature; None unless requested."""
    response_mask: np.ndarray | None = None
    """bool [T]: True for tokens that the policy produced. The other tokens of an episode have version −1 and log-probability 0. None,
    as from every engine, if the policy produced all tokens."""
    prompt_ids: np.ndarray | None = None
    """int64 [P]: the prompt of a sequence that an episode forked. None, as from every engine, stands for the prompt of the request."""

    @property
    def produced_T(self) -> np.ndarray:
        """The tokens that the policy produced, as a mask, bool [T]."""
        mask_T = self.response_mask
        return np.ones(len(self.response_ids), np.bool_) if mask_T is None else mask_T

    def after(self, earlier: Completion) -> Completion:
        """Return the whole sample: an aborted completion, continued by this completion.

        To continue a sample, request a prompt that consists of the sample's prompt and its tokens so far. Advance the
        stream's `offset` by the number of these tokens. No text is tokenised again.

        Args:
            earlier: the aborted completion, T₀ tokens.

        Returns:
            T₀ + T tokens, each with the version of the weights that produced it; log-probabilities if both completions have them.
        """
        return attrs.evolve(
            self,
            request_id=earlier.request_id,
            sample=earlier.sample,
            response_ids=np.concatenate([earlier.response_ids, self.response_ids]),
            weight_versions=np.concatenate([earlier.weight_versions, self.weight_versions]),
            log_probs=_joined(earlier.log_probs, self.log_probs),
            raw_log_probs=_joined(earlier.raw_log_probs, self.raw_log_probs),
        )


class BaseRollout(Plugin):
    """One replica of a generation engine.

    Completions stream: each is yielded as soon as it is finished, while other samples are still generated.
    """

    @abstractmethod
    def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        """Yield every sample of the request as it finishes, in any order.

        Raises:
            RequestRefusedError: the engine does not accept the request; the error ends the run.
            RolloutError: the engine failed; its requests are sent again to a restarted engine.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; their samples are yielded with `FinishReason.ABORT`."""

    @abstractmethod
    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop starting requests; `mode` says whether to abort, finish or keep running requests."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after a pause: start requests again, and continue kept requests."""

    async def reset_cache(self) -> None:
        """Drop cached prefixes; called when new weights are committed."""

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        """Check, before the transfer starts, that a weight update can be loaded; otherwise the sender would wait for the receiver.

        Raises:
            WeightSyncError: the engine does not support this kind of update, or these tensors.
        """

    @abstractmethod
    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """Load the weights that the trainer sends, verify them, and commit them as `version`.

        Raises:
            WeightSyncError: a tensor differs from the one sent; the old version stays in use.
        """

    @property
    def receivers(self) -> int:
        """Number of weight receivers: one in each of the replica's processes that hold a part of the model."""
        return int(self.config.ranks_per_replica())

    @property
    def machine(self) -> str | None:
        """Machine of the weight receivers, as in `PluginContext.machine`; None if unknown, or if the run is on one machine."""
        return self.context.machine

    def alive(self) -> bool:
        """Return whether the replica can still generate; False once its engine has died, so that only a new replica can take over.

        The call may query another process and so block for a moment.
        """
        return True

    @property
    def draining(self) -> bool:
        """Whether the engine will end soon, as on a preempted machine. Such an engine gets no more requests, and its end is no failure.

        The property is read often, so it must not block.
        """
        return False

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of given tokens; needs the capability `scores`.

        Args:
            sequences: token ids, int64 [L_i] each, L_i ≥ 2.

        Returns:
            float32 [L_i − 1] each: the log-probability (nats, full softmax, temperature 1) of every token but the
            first, given the tokens before it.

        Raises:
            RolloutError: the engine failed, or does not support scoring.
        """
        raise RolloutError(
            f"rollout {self.name!r} can't return the log-probabilities of given tokens: it lacks the capability 'scores'"
        )

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics since the last call, by name (`rollout/prefix_cache_hits`, …), which merge over replicas."""
        return {}

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        """Free accelerator memory while no request runs.

        Args:
            tags: a subset of {"weights", "kv_cache"}.
            keep_weights: whether `wake` must restore the weights. False means that a full weight update follows before
                the next request; only engines with the capability `discards_weights` get False.

        Returns:
            The number of bytes freed on the accelerator, as measured.
        """
        return 0

    def wake(self, tags: frozenset[str]) -> None:
        """Allocate the memory of these tags again, after `sleep`."""


async def closable(completions: AsyncIterator[Completion]) -> AsyncGenerator[Completion, None]:
    """Yield from `completions`, the iterator that `submit` returned; closing this generator also closes the iterator."""
    try:
        async for completion in completions:
            yield completion
    finally:
        closing = getattr(completions, "aclose", None)
        if closing is not None:
            await closing()


def _joined(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    if earlier is None or later is None:
        return None
    return np.concatenate([earlier, later])
