"""BaseRollout: one replica of a generation engine, token ids in and out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
import numpy as np

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from dovetail.interfaces.transport import WeightManifest
    from dovetail.numerics.streams import SampleStream

ROLLOUT_API = "1.0"


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """A stop token or stop string was produced (a stop token is part of the response)."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    ABORT = "abort"
    """It was aborted; the tokens so far are valid."""


class PauseMode(StrEnum):
    """What happens to running requests when a replica is paused."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn. Log-probabilities are in nats."""

    max_new_tokens: int
    """Upper bound on produced tokens, stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose mass reaches this."""
    top_k: int = -1
    """Only the k most likely tokens; -1 means all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token: fixed lengths, for benchmarks."""
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


class BaseRollout(Plugin):
    """One replica of a generation engine.

    Completions stream: each is yielded as soon as it is finished, while others still generate.
    """

    @abstractmethod
    def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        """Yield every sample of the request as it finishes, in any order.

        Raises:
            RolloutError: the engine failed; no completion is lost silently.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; their samples are yielded with `FinishReason.ABORT`."""

    @abstractmethod
    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop starting work; running requests are aborted, waited for, or kept."""

    @abstractmethod
    async def resume(self) -> None:
        """Take up work again."""

    async def reset_cache(self) -> None:
        """Forget cached prefixes; called when new weights are committed."""

    @abstractmethod
    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """Load the weights that the trainer sends, verify them, and commit them as `version`.

        Raises:
            WeightSyncError: a tensor did not arrive as it was sent; the old version stays in force.
        """

    def sleep(self, tags: frozenset[str]) -> int:
        """Free memory; tags are a subset of {"weights", "kv_cache"}. Returns the bytes freed."""
        return 0

    def wake(self, tags: frozenset[str]) -> None:
        """Take the memory of these tags again."""
