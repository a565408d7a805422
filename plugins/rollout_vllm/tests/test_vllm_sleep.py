"""Sleep and wake of an engine that is already partly asleep, on a fake engine that refuses tags as vLLM does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail_rollout_vllm.engine_driver import EngineDriver

WEIGHTS, CACHE = frozenset({"weights"}), frozenset({"kv_cache"})
EVERYTHING = WEIGHTS | CACHE


class Engine:
    """Sleeps as a whole and only from being awake; wakes nothing where it is told a tag that does not sleep."""

    errored = False

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.asleep: frozenset[str] = frozenset()
        self.paused = False
        self.dropped: list[str] = []

    async def collective_rpc(self, method: str, args: Any = ()) -> list[int]:
        return [len(self.asleep)]

    async def sleep(self, level: int) -> None:
        if not self.asleep:
            self.asleep = EVERYTHING

    async def is_paused(self) -> bool:
        return self.paused

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self) -> bool:
        self.dropped.append("prefixes")
        return len(self.dropped) > 1

    async def reset_encoder_cache(self) -> None:
        self.dropped.append("images")

    async def wake_up(self, tags: list[str]) -> None:
        if self.asleep.issuperset(tags):
            self.asleep -= frozenset(tags)


@pytest.mark.parametrize("again", [WEIGHTS, EVERYTHING])
def test_an_engine_whose_cache_still_sleeps_goes_to_sleep_and_wakes_whole(again) -> None:
    """As where an update failed elsewhere, and is sent again before the cache was woken."""
    engine = Engine()
    driver = EngineDriver(engine)

    async def act() -> None:
        await driver.sleep(EVERYTHING, keep_weights=False)
        await driver.wake(WEIGHTS)
        assert engine.asleep == CACHE

        assert await driver.sleep(again, keep_weights=False) == 1
        assert engine.asleep == EVERYTHING
        await driver.wake(WEIGHTS)
        assert engine.asleep == CACHE
        await driver.wake(CACHE)
        assert engine.asleep == frozenset()

    asyncio.run(act())


def test_what_sleeps_along_with_the_weights_wakes_with_them() -> None:
    engine = Engine()
    driver = EngineDriver(engine)

    async def act() -> None:
        await driver.sleep(WEIGHTS, keep_weights=True)
        assert engine.asleep == EVERYTHING
        await driver.wake(WEIGHTS)
        assert engine.asleep == frozenset()

    asyncio.run(act())


def test_a_cache_that_slept_along_and_is_put_to_sleep_waits_for_its_own_waking() -> None:
    engine = Engine()
    driver = EngineDriver(engine)

    async def act() -> None:
        await driver.sleep(WEIGHTS, keep_weights=True)
        await driver.sleep(CACHE, keep_weights=True)
        await driver.wake(WEIGHTS)
        assert engine.asleep == CACHE
        await driver.wake(CACHE)
        assert engine.asleep == frozenset()

    asyncio.run(act())


def test_what_an_earlier_run_left_asleep_and_paused_is_undone() -> None:
    engine = Engine()
    driver = EngineDriver(engine)

    async def act() -> None:
        await driver.sleep(EVERYTHING, keep_weights=True)
        engine.paused = True
        await driver.settle()

    asyncio.run(act())
    assert engine.asleep == frozenset()
    assert not engine.paused


def test_neither_prefixes_nor_encoded_images_of_old_weights_stay_cached() -> None:
    engine = Engine()
    asyncio.run(EngineDriver(engine).reset_cache())
    assert engine.dropped == ["prefixes", "prefixes", "images"]
