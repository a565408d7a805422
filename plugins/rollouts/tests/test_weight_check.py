"""The weight check: whether replicas compute with the weights that they were sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RequestRefusedError, WeightSyncError
from dovetail.interfaces import MediaRef
from dovetail.interfaces.data import Prompt
from dovetail.sections.rollout import WeightCheckSection
from dovetail_rollouts.weight_check import WeightCheck, difference, join_prompts

SCORES = frozenset({"scores"})


def test_agreement_is_measured_on_every_replica_and_reported_apart(
    mortal: Any, make_world: Any
) -> None:
    log: list[str] = []
    world = make_world([mortal(log), mortal(log, off=5e-5)], log=log, capabilities=SCORES)
    world.sync.bring(1)
    assert sorted(log) == sorted(["forward", "send 1", "take 1", "take 1", "score", "score"])
    assert world.metrics["weight_check/mean_difference"] == pytest.approx(5e-5, rel=1e-2)
    assert world.metrics["weight_check/max_difference"] == pytest.approx(5e-5, rel=1e-2)
    assert world.phases == ["weight_check", "weight_sync", "weight_check"]
    assert world.told[-1][0] == "weights_checked"


def test_trainer_and_replica_score_the_runs_first_prompts(mortal: Any, make_world: Any) -> None:
    world = make_world([mortal()], capabilities=SCORES)
    world.sync.bring(1)
    (batch,) = world.actor.asked
    for row, ids in enumerate([[0, 1, 2, 2, 3], [1, 2, 3, 3, 4]]):
        assert [*batch["prompt_ids"][row], *batch["response_ids"][row]] == ids
    assert batch["response_mask"].values.all()
    assert batch["temperature"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("every", "probed"), [(1, [1, 2, 3, 4]), (2, [1, 3]), (10, [1]), (0, [])])
def test_the_first_update_is_probed_and_every_so_many_after_it(
    every: int, probed: list[int], mortal: Any, make_world: Any
) -> None:
    world = make_world(
        [mortal()], capabilities=SCORES, weight_check=WeightCheckSection(every=every)
    )
    for version in range(1, 5):
        world.metrics.clear()
        world.sync.bring(version)
        assert ("weight_check/mean_difference" in world.metrics) == (version in probed)


def test_an_engine_that_does_not_score_is_not_probed(mortal: Any, make_world: Any) -> None:
    world = make_world([mortal()])
    world.sync.bring(1)
    assert world.actor.asked == []
    assert "weight_check/mean_difference" not in world.metrics


def test_a_replica_that_was_started_again_is_probed_whatever_the_schedule(
    mortal: Any, make_world: Any
) -> None:
    world = make_world([mortal()], capabilities=SCORES, weight_check=WeightCheckSection(every=100))
    world.sync.bring(1)
    world.pool.replicas.usable[0].refuses = 1  # type: ignore[attr-defined]
    world.metrics.clear()
    world.sync.bring(2)
    assert "weight_check/mean_difference" in world.metrics


def test_a_replica_that_is_off_is_started_again_once(mortal: Any, make_world: Any) -> None:
    world = make_world([mortal(), mortal(off=0.5)], capabilities=SCORES)
    world.sync.bring(1)
    assert world.metrics["rollout/restarts"] == 1.0
    assert world.metrics["weight_check/mean_difference"] == 0.0
    assert world.pool.replicas.versions == {0: 1, 1: 1}


@pytest.mark.parametrize("max_restarts", [0, 5])
def test_a_replica_that_stays_off_ends_the_run_by_name(
    max_restarts: int, mortal: Any, make_world: Any
) -> None:
    world = make_world([mortal(), mortal(off=0.5)], capabilities=SCORES, max_restarts=max_restarts)
    world.next_off = 0.5
    with pytest.raises(
        WeightSyncError,
        match=r"replica 1 .* by 0\.5 nats a token .*weight_check\.tolerance allows 0\.0001 on average \(float32\)",
    ):
        world.sync.bring(1)
    assert len(world.made) == min(max_restarts, 1)


def test_a_replica_that_can_not_score_ends_the_run(mortal: Any, make_world: Any) -> None:
    class Mute(mortal):
        async def score(self, sequences):
            raise ValueError("no prompt log-probabilities")

    world = make_world([Mute()], capabilities=SCORES, max_restarts=0)
    with pytest.raises(
        WeightSyncError,
        match=r"of the weight check.*ValueError: no prompt",
    ):
        world.sync.bring(1)


def test_sequences_that_an_engine_does_not_take_are_no_reason_to_start_it_again(
    mortal: Any, make_world: Any
) -> None:
    class Short(mortal):
        async def score(self, sequences):
            raise RequestRefusedError("70 tokens exceed the model's 64 positions")

    world = make_world([Short()], capabilities=SCORES, max_restarts=3)
    with pytest.raises(WeightSyncError, match=r"could not score .*: 70 tokens exceed"):
        world.sync.bring(1)
    assert world.made == []


def test_what_is_no_number_is_infinitely_far_away() -> None:
    row = np.zeros(3, np.float32)
    assert difference([row], [row]) == (0.0, 0.0)
    assert difference([row, row], [row, row + np.array([0, 0, 3])]) == (0.5, 3.0)
    for wrong in ([row + math.nan], [row[:2]], [row, row], []):
        assert difference([row], wrong) == (math.inf, math.inf)


def test_a_token_counts_as_much_as_the_trainer_finds_it_likely() -> None:
    trainer = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    mean, largest = difference([trainer], [trainer + np.array([0, 0.1, 3], np.float32)])
    assert mean == pytest.approx(0.3 * 0.1 + 0.1 * 3)
    assert largest == pytest.approx(3)
    # Tokens are compared even if the trainer's probability of every token underflows.
    assert difference([trainer - 2000], [trainer - 2001])[0] == pytest.approx(1, rel=1e-3)


def prompt(*ids: int, images: int = 0) -> Prompt:
    media = (MediaRef(digest="0" * 64, path="image.png"),) * images
    return Prompt(index=0, prompt_ids=np.array(ids), raw="", media=media)


def test_sequences_begin_with_prompts_and_go_on_with_the_next_ones_that_no_other_has() -> None:
    prompts = [prompt(1, 2), prompt(3), prompt(4, 5, 6, 7), prompt(8), prompt(9, 9, 9)]
    joined = join_prompts(prompts, 2, 4, ())
    assert [ids_L.tolist() for ids_L in joined] == [[1, 2, 4, 5], [3, 8, 1, 2]]
    assert {ids_L.dtype for ids_L in joined} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("count", "tokens"), [(1, 2), (1, 64), (3, 64), (4, 64), (5, 2)])
def test_a_few_short_prompts_are_repeated(count: int, tokens: int) -> None:
    joined = join_prompts([prompt(number) for number in range(count)], 4, tokens, ())
    assert [len(ids_L) for ids_L in joined] == [tokens] * 4
    assert [ids_L[0] for ids_L in joined] == [s % count for s in range(4)]


def test_special_tokens_are_left_out_of_prompts_with_images_alone() -> None:
    joined = join_prompts([prompt(7, 1, 7, 7, 2, images=2), prompt(7, 3)], 1, 4, {7})
    assert joined[0].tolist() == [1, 2, 7, 3]


def test_prompts_of_images_alone_leave_nothing_to_check() -> None:
    assert join_prompts([prompt(7, 7, images=1)], 2, 4, {7}) == []


def test_a_run_that_can_not_be_checked_for_want_of_text_says_so_once(
    mortal: Any, make_world: Any
) -> None:
    images = [prompt(7, 7, images=1)]
    world = make_world([mortal()], capabilities=SCORES, prompts=images)
    world.sync.bring(1)
    world.sync.bring(2)
    assert world.actor.asked == []
    (message,) = [event for event, _ in world.told if "weight check" in event]
    assert "does not check that" in message
    for silent in ({"capabilities": frozenset()}, {"weight_check": WeightCheckSection(every=0)}):
        world = make_world([mortal()], prompts=images, **{"capabilities": SCORES, **silent})
        world.sync.bring(1)
        assert world.told == []


def test_the_tolerance_follows_the_dtype_unless_it_is_set() -> None:
    assert WeightCheck(WeightCheckSection(), (), "float32").tolerance == 1e-4
    assert WeightCheck(WeightCheckSection(), (), "bfloat16").tolerance == 0.05
    assert WeightCheck(WeightCheckSection(tolerance=0.2), (), "bfloat16").tolerance == 0.2
