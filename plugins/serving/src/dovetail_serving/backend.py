"""Backend: what a rollout needs of a running engine, whether it drives the engine itself or speaks to a server."""

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
    """An update was called off before it started, since another receiver will not connect."""


@attrs.frozen(kw_only=True, eq=False)
class SampleCall:
    """One sample to generate."""

    call_id: str
    """Id of the call, unique among running calls."""
    prompt_ids: Sequence[int]
    """The P token ids of the prompt."""
    sampling: SamplingParams
    seed: int | None = None
    """The sample's own seed; None draws from the engine's generator."""
    media: tuple[MediaRef, ...] = ()
    """The prompt's images by reference, in the order of their tokens; every process of the engine reaches their paths."""
    priority: int = 0
    """Priority as in `RolloutRequest.priority`; an engine that runs out of memory for keys and values stops the highest numbers first."""


@attrs.frozen(kw_only=True, eq=False)
class SampleResult:
    """The result of one sample; after an abort, the tokens so far."""

    response_ids: np.ndarray
    """int64 [T]."""
    finish_reason: FinishReason
    log_probs: np.ndarray | None = None
    """float32 [T], nats, under the sampler as used; None unless asked for."""
    raw_log_probs: np.ndarray | None = None
    """float32 [T], nats, full softmax of logits / temperature, where they differ from `log_probs`; None where they are the
    same or were not asked for."""
    weight_versions: np.ndarray | None = None
    """int64 [T]: version of the weights that produced each token; None where the engine does not say, and all are of the version
    that was in force when the call began."""


class Backend(ABC):
    """One running engine. Asynchronous methods work under any event loop; the others block and are called from one thread.

    Every method raises RolloutError where the engine failed; once the engine has died, running and later calls raise one with the cause and
    the last output.
    """

    @abstractmethod
    def start(self) -> None:
        """Start or join the engine, and check that it answers; errors include its output."""

    @abstractmethod
    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts it."""

    @abstractmethod
    async def abort(self, call_ids: Sequence[str]) -> None:
        """End these calls: `generate` returns their tokens so far, with `FinishReason.ABORT`."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return float32 [L_i − 1]: log-probabilities (full softmax, temperature 1) of every token but the first."""

    @abstractmethod
    async def reset_cache(self) -> None:
        """Drop cached prefixes."""

    @abstractmethod
    def load(self, version: int, manifest: WeightManifest) -> None:
        """Let all workers receive, verify and load the weights of a manifest; nothing is generated meanwhile.

        Raises:
            OthersFailedError: the update was called off, and not by one of these workers.
            WeightsUntouchedError: the update failed before any worker changed its model.
            WeightSyncError: a worker did not receive all weights; the engine may hold a mixture, and must not generate
                until a later `load` succeeds or it is restarted.
        """

    @abstractmethod
    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        """Free the memory of these tags on the accelerators, and return the bytes measured."""

    @abstractmethod
    def wake(self, tags: frozenset[str]) -> None:
        """Allocate the freed memory again."""

    async def freeze(self) -> None:
        """Pause all calls until `thaw`; a `load` meanwhile keeps their keys and values.

        Raises:
            RolloutError: the engine can't pause calls.
        """
        raise RolloutError(
            "the engine can't keep running requests with their keys and values",
            hint="set rollout.keep_cache=false",
        )

    async def thaw(self) -> None:
        """Continue the calls after `freeze`; each of their tokens records its version (`SampleResult.weight_versions`)."""

    def alive(self) -> bool:
        """Return whether the engine still answers."""
        return True

    @property
    def draining(self) -> bool:
        """Whether the engine will be ended soon; see `BaseRollout.draining`."""
        return False

    @abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """Return the engine's metrics since the last call; they merge over replicas."""

    @abstractmethod
    def close(self) -> None:
        """End what `start` started; safe to call twice, and after a failed start."""
