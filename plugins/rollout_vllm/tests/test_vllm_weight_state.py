"""Updates after a failed one or a sleep: an adapter's update does not restore the weights below the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import AdapterSpec, TensorSpec, WeightManifest
from dovetail.metrics import Metric
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_serving import Backend, SampleCall, SampleResult

EVERYTHING = frozenset({"weights", "kv_cache"})
SEQUENCE = np.arange(3)


class PlainBackend(Backend):
    """Takes updates unless told to tear them, and notes what sleep was to keep."""

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.tears = False

    def start(self) -> None:
        """Nothing to start."""

    async def generate(self, call: SampleCall) -> SampleResult:
        raise NotImplementedError

    async def abort(self, call_ids: Sequence[str]) -> None:
        """Nothing runs."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.zeros(len(ids) - 1, np.float32) for ids in sequences]

    async def reset_cache(self) -> None:
        """No cache."""

    def load(self, version: int, manifest: WeightManifest) -> None:
        if self.tears:
            raise WeightSyncError(f"weight update {version} broke off")

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        self.kept.append(keep_weights)
        return 0

    def wake(self, tags: frozenset[str]) -> None:
        """Nothing was let go."""

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def close(self) -> None:
        """Nothing to end."""


def update(version: int, *, adapter: bool) -> WeightManifest:
    spec = AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",))
    return WeightManifest(
        version=version,
        kind="adapter" if adapter else "full",
        tensors=(TensorSpec(name="w", shape=(1,), dtype="float32"),),
        adapter=spec if adapter else None,
    )


@pytest.fixture
def engine(config: Any, context: Any) -> Any:
    """Makes an engine over a plain backend."""

    def make(**settings: Any) -> VllmRollout:
        engine = VllmRollout(config(**settings), attrs.evolve(context(), transport=object()))
        engine._backend = PlainBackend()
        return engine

    return make


def test_with_room_for_an_adapter_sleep_keeps_the_weights_before_the_first_one(engine) -> None:
    rollout = engine(max_adapter_rank=8)

    rollout.sleep(EVERYTHING, keep_weights=False)
    rollout.wake(EVERYTHING)
    rollout.receive_weights(1, update(1, adapter=True))

    assert rollout.backend.kept == [True]
    assert len(asyncio.run(rollout.score([SEQUENCE]))) == 1


def test_without_room_for_an_adapter_sleep_lets_the_weights_go_as_asked(engine) -> None:
    rollout = engine()

    rollout.sleep(EVERYTHING, keep_weights=False)
    rollout.wake(EVERYTHING)

    assert rollout.backend.kept == [False]
    with pytest.raises(RolloutError, match="freed during sleep"):
        asyncio.run(rollout.score([SEQUENCE]))
    rollout.receive_weights(1, update(1, adapter=False))
    assert len(asyncio.run(rollout.score([SEQUENCE]))) == 1


def test_an_adapter_does_not_mend_whole_weights_that_were_torn(engine) -> None:
    rollout = engine(max_adapter_rank=8)
    rollout.backend.tears = True
    with pytest.raises(WeightSyncError):
        rollout.receive_weights(1, update(1, adapter=False))
    rollout.backend.tears = False

    with pytest.raises(WeightSyncError, match=r"base weights.*update 1 failed"):
        rollout.receive_weights(2, update(2, adapter=True))
    with pytest.raises(RolloutError, match="update 1 failed"):
        asyncio.run(rollout.score([SEQUENCE]))

    rollout.receive_weights(3, update(3, adapter=False))
    rollout.receive_weights(4, update(4, adapter=True))
    assert rollout.version == 4
    assert len(asyncio.run(rollout.score([SEQUENCE]))) == 1


def test_an_adapter_mends_an_adapter_that_was_torn(engine) -> None:
    rollout = engine(max_adapter_rank=8)
    rollout.backend.tears = True
    with pytest.raises(WeightSyncError):
        rollout.receive_weights(1, update(1, adapter=True))
    rollout.backend.tears = False

    rollout.receive_weights(2, update(2, adapter=True))

    assert len(asyncio.run(rollout.score([SEQUENCE]))) == 1


def test_nothing_is_generated_on_the_random_weights_of_the_start(
    config: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = attrs.evolve(context(), transport=object(), weights_follow=True)
    engine = VllmRollout(config(), follows)
    monkeypatch.setattr(engine, "make_backend", PlainBackend)
    engine.start()
    with pytest.raises(RolloutError, match="received no weights yet"):
        asyncio.run(engine.score([SEQUENCE]))
    engine.receive_weights(1, update(1, adapter=False))
    asyncio.run(engine.score([SEQUENCE]))
