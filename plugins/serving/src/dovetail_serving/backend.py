"""Backend: a rollout's interface to a running engine, in this process or behind a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from dovetail.errors import CalledOffError, RolloutError, WeightSyncError
from dovetail.interfaces import FinishReason, MediaRef, SamplingParams, WeightManifest
from dovetail.metrics import Metric


class WeightsUntouchedError(WeightSyncError):
    """An update failed before any weight of the model was overwritten."""


class OthersFailedError(WeightsUntouchedError, CalledOffError):
    """A weight update was called off before it started, since another of its receivers (engine processes) will not connect."""


@attrs.frozen(kw_only=True, eq=False)
class SampleCall:
    """One sample to generate."""

    call_id: str
    """Id of the call, unique among running calls."""
    prompt_ids: Sequence[int]
    """The P token ids of the prompt."""
    sampling: SamplingParams
    seed: int | None = None
    """The sample's seed; None draws from the engine's random generator."""
    media: tuple[MediaRef, ...] = ()
    """References to the prompt's images, in the order of the image tokens; every process of the engine can read their paths."""
    priority: int = 0
    """Priority as in `RolloutRequest.priority`. An engine that runs out of KV cache preempts the samples with the highest numbers first."""


@attrs.frozen(kw_only=True, eq=False)
class SampleResult:
    """The result of one sample; after an abort, with the tokens generated so far."""

    response_ids: np.ndarray
    """The generated token ids, int64 [T]."""
    finish_reason: FinishReason
    log_probs: np.ndarray | None = None
    """Log-probabilities, float32 [T] in nats, under the distribution of the sampler; None unless requested."""
    raw_log_probs: np.ndarray | None = None
    """Log-probabilities, float32 [T] in nats, under the full softmax of logits / temperature; None if equal to `log_probs` or not
    requested.
    """
    weight_versions: np.ndarray | None = None
    """Version of the weights that produced each token, int64 [T]; None if all are of the version at the call's start."""


class Backend(ABC):
    """Interface to one running engine. Async methods work under any event loop; other methods block and are called from one thread.

    Every method raises RolloutError if the engine failed. After the engine has died, running and later calls raise a RolloutError with the
    cause and the engine's last output.
    """

    @abstractmethod
    def start(self) -> None:
        """Start or join the engine, and check that it answers; errors include its output."""

    @abstractmethod
    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts it."""

    @abstractmethod
    async def abort(self, call_ids: Sequence[str]) -> None:
        """Abort these calls: `generate` returns the tokens generated so far, with `FinishReason.ABORT`."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probabilities (full softmax, temperature 1) of every token but the first, float32 [L_i − 1] for each sequence."""

    @abstractmethod
    async def reset_cache(self) -> None:
        """Drop the prefix cache."""

    @abstractmethod
    def load(self, version: int, manifest: WeightManifest) -> None:
        """Let all workers receive, verify and load the weights that the manifest describes, while no call generates.

        Raises:
            OthersFailedError: the update was called off by a receiver outside this engine.
            WeightsUntouchedError: the update failed before any worker changed its model.
            WeightSyncError: a worker did not receive all weights. The engine may hold mixed weights, and must not generate before a later
                `load` succeeds or the engine is restarted.
        """

    @abstractmethod
    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        """Free the accelerators' memory for `tags` (`weights`, `kv_cache`), and return the measured number of freed bytes.

        With `keep_weights`, `wake` restores the weights; without, a complete update must follow before the next call.
        """

    @abstractmethod
    def wake(self, tags: frozenset[str]) -> None:
        """Allocate again the memory that `sleep` freed for these tags."""

    async def freeze(self) -> None:
        """Pause all calls until `thaw`. A `load` of new weights meanwhile leaves their KV cache, computed by the old weights, as it is.

        Raises:
            RolloutError: the engine can't pause calls.
        """
        raise RolloutError(
            "the engine can't pause running requests and keep their KV cache",
            hint="set rollout.keep_cache=false",
        )

    async def thaw(self) -> None:
        """Continue the calls that `freeze` paused; `SampleResult.weight_versions` then gives each token's version."""

    def alive(self) -> bool:
        """Return whether the engine still answers."""
        return True

    @property
    def draining(self) -> bool:
        """Whether the engine will be shut down soon; see `BaseRollout.draining`."""
        return False

    @abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """Return the engine's metrics since the last call, as Metrics that can be merged over replicas."""

    @abstractmethod
    def close(self) -> None:
        """End the engine or the connection that `start` made; safe to call twice, and after a failed start."""
