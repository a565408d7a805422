"""The groups that a step takes if later groups may come first: no step waits longer than in order, and no group is taken too late."""

from __future__ import annotations

from random import Random

import attrs
from hypothesis import given, strategies as st

from dovetail_rollouts.early_release import EarlyRelease


@attrs.define(eq=False)
class One:
    """A group, as far as `EarlyRelease` reads one."""

    due: int | None
    finished: bool = False


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    behind=st.integers(0, 4),
    sync_every=st.integers(1, 3),
    spare=st.floats(0, 1),
    rounds=st.booleans(),
)
def test_every_group_is_taken_in_time_whatever_finishes_first(
    seed: int, batch: int, behind: int, sync_every: int, spare: float, rounds: bool
) -> None:
    chance = Random(seed)
    most = (behind + 1) * sync_every
    limit = int((sync_every + spare * (most - sync_every)) * batch)
    admitted: list[One] = []
    passed_over = 0
    for step in range(1, 30):
        unpublished = (step - 1) % sync_every
        room = max(limit - unpublished * batch, batch) - len(admitted)
        admitted += [One(step - 1 - unpublished + most) for _ in range(room)]
        release = EarlyRelease(step=step, batch=batch)
        # A step that replaces dropped groups takes groups in several rounds.
        for count in [batch - 1, 1] if rounds and batch > 1 else [batch]:
            while (chosen := release.choose(admitted, count)) is None:
                chance.choice([one for one in admitted if not one.finished]).finished = True
            assert len(set(chosen)) == count
            assert all(one.finished and one.due >= step for one in chosen)
            left = [one for one in admitted if one not in chosen]
            passed_over += any(one.due < max(c.due for c in chosen) for one in left)
            admitted = left
    assert passed_over == 0 or limit < most * batch


def test_with_room_a_step_takes_what_is_finished_and_without_it_waits_for_what_is_due() -> None:
    release = EarlyRelease(step=1, batch=2)
    slow, fast, other, later = groups = [One(2), One(2), One(2), One(3)]
    fast.finished = True
    assert release.choose(groups, 2) is None
    later.finished = True
    # `slow` and `other` are left for step 2.
    assert release.choose(groups, 2) == [fast, later]
    assert release.choose([attrs.evolve(slow, due=1), fast, other, later], 2) is None
    # Three groups that are due in step 2 do not fit into step 2.
    assert release.choose([slow, other, One(2), fast, later], 2) is None


def test_groups_that_can_not_be_in_time_any_more_are_taken_in_order() -> None:
    late = [One(1, finished=True), One(1), One(1), One(9, finished=True)]
    release = EarlyRelease(step=5, batch=2)
    assert release.choose(late, 2) is None
    late[1].finished = True
    assert release.choose(late, 2) == late[:2]


def test_groups_without_a_bound_may_always_be_passed_over() -> None:
    groups = [One(None), One(None, finished=True), One(None, finished=True)]
    assert EarlyRelease(step=1, batch=1).choose(groups, 2) == groups[1:]
