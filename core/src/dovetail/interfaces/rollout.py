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
    """Why a response ended."""

    STOP = "stop"
    """A stop token or stop string was produced (a stop token is part of the response)."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are valid."""


class PauseMode(StrEnum):
    """The treatment of running requests when a replica is paused."""

    ABORT = "abort"
    """They are aborted, with their tokens so far."""
    WAIT = "wait"
    """They run to their end."""
    KEEP = "keep"
    """They stop where they are and continue when the replica is resumed. After an update, keys and values of the tokens so far are
    recomputed with the new weights."""
    KEEP_CACHE = "keep_cache"
    """As `KEEP`, but after an update the keys and values of the tokens so far stay as the old weights computed them. Requests submitted
    later use none of them. Only given to engines with the capability `keeps_cache`."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn. Log-probabilities are in nats."""

    max_new_tokens: int
    """Upper bound on produced tokens, stop token included."""
    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass: tokens are drawn from the smallest set of most likely ones whose mass reaches it."""
    top_k: int = -1
    """Number of most likely tokens to draw from; -1 means all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    ignore_eos: bool = False
    """Continue past the end-of-sequence token, for benchmarks with fixed lengths."""
    log_probs: bool = False
    """Return log-probabilities under the sampler as used (temperature, top-p, top-k)."""
    raw_log_probs: bool = False
    """Return log-probabilities under the full softmax of logits / temperature."""


@attrs.frozen(kw_only=True, eq=False)
class RolloutRequest:
    """One prompt, and the samples to draw for it."""

    request_id: str
    """Unique among running requests."""
    prompt_ids: np.ndarray
    """int64 [P]: the prompt as the engine sees it."""
    sampling: SamplingParams
    streams: tuple[SampleStream, ...]
    """One random stream a sample; their number is the number of samples."""
    media: tuple[MediaRef, ...] = ()
    """The prompt's images by reference, in the order in which its tokens stand for them: only given to engines with the
    capability `images`. `prompt_ids` holds as many tokens for each as it has in the model."""
    priority: int = 0
    """Waiting requests with the lowest number begin first; among equals, the one that arrived first. A waiting request never
    interrupts a running one. An engine without priorities begins requests in their order of arrival."""

    @property
    def n(self) -> int:
        """Samples to draw."""
        return len(self.streams)


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One finished sample of a request."""

    request_id: str
    sample: int
    """Index into the request's `streams`."""
    response_ids: np.ndarray
    """int64 [T]: produced tokens, the stop token included."""
    finish_reason: FinishReason
    weight_versions: np.ndarray
    """int64 [T]: version of the weights that produced each token."""
    log_probs: np.ndarray | None = None
    """float32 [T], nats, under the sampler as used; None unless asked for."""
    raw_log_probs: np.ndarray | None = None
    """float32 [T], nats, full softmax of logits / temperature; None unless asked for."""
    response_mask: np.ndarray | None = None
    """bool [T]: of a whole episode, True where the policy produced the token; elsewhere the version is −1 and log-probabilities
    are 0. None, as from every engine, where it produced all."""
    prompt_ids: np.ndarray | None = None
    """int64 [P]: the prompt of a further sequence of an episode; None, as from every engine, where it is the request's prompt."""

    @property
    def produced_T(self) -> np.ndarray:
        """True where the policy produced the token, bool [T]."""
        mask_T = self.response_mask
        return np.ones(len(self.response_ids), np.bool_) if mask_T is None else mask_T

    def after(self, earlier: Completion) -> Completion:
        """Return the whole sample, where this completion continues an earlier part that was aborted.

        A sample is continued by asking for its prompt and the tokens so far as the prompt, with its stream's `offset`
        moved on by their number: token ids go on as they are, and no text is tokenised again.

        Args:
            earlier: the part before, T₀ tokens.

        Returns:
            T₀ + T tokens, each with the version of the weights that produced it; log-probabilities where both have them.
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

    Completions stream: each is yielded as soon as it is finished, while others still generate.
    """

    @abstractmethod
    def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        """Yield every sample of the request as it finishes, in any order.

        Raises:
            RequestRefusedError: the engine does not accept the request; this ends the run.
            RolloutError: the engine failed; its requests are sent again, to a restarted engine.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; their samples are yielded with `FinishReason.ABORT`."""

    @abstractmethod
    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop starting work; running requests are aborted, waited for, or kept."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue working."""

    async def reset_cache(self) -> None:
        """Drop cached prefixes; called when new weights are committed."""

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        """Refuse an update that can't be loaded, before sender and receiver start: else the sender would wait for the receiver.

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
        """How many receivers of weights it has: one in each of its processes that hold a part of the model."""
        return int(self.config.ranks_per_replica())

    @property
    def machine(self) -> str | None:
        """Where its receivers are, as `PluginContext.machine`; None where that is not known, or the run is on one machine."""
        return self.context.machine

    def alive(self) -> bool:
        """Return whether it can still be asked; False once what generates has died, and only a new replica can take its place.

        May ask another process, so it blocks for a moment.
        """
        return True

    @property
    def draining(self) -> bool:
        """Whether the engine will be ended soon, as on a machine that is taken away: it gets no more requests, and its end is not a
        failure.

        Asked often, so it answers from what is known.
        """
        return False

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of given tokens; needs the capability `scores`.

        Args:
            sequences: int64 [L_i] each, L_i ≥ 2.

        Returns:
            float32 [L_i − 1] each: the log-probability (nats, full softmax, temperature 1) of every token but the
            first, given those before it.

        Raises:
            RolloutError: the engine failed, or does not score.
        """
        raise RolloutError(f"rollout {self.name!r} does not score given tokens")

    def metrics(self) -> Mapping[str, Metric]:
        """Return metrics since the last call, by name (`rollout/prefix_cache_hits`, …); they merge over replicas."""
        return {}

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        """Free memory while nothing runs.

        Args:
            tags: a subset of {"weights", "kv_cache"}.
            keep_weights: whether `wake` must bring the weights back as they were. False, only given to engines with
                the capability `discards_weights`: a whole update follows before the next request.

        Returns:
            The bytes freed on the accelerator, measured.
        """
        return 0

    def wake(self, tags: frozenset[str]) -> None:
        """Allocate the memory of these tags again."""


async def closable(completions: AsyncIterator[Completion]) -> AsyncGenerator[Completion, None]:
    """Yield the completions of `submit`, whatever kind of iterator it returned, from a generator whose closing closes the iterator."""
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
