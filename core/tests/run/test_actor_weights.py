"""ActorWeights: a version is one state of the actor's weights, whatever fails while it is sent."""

from __future__ import annotations

import pytest

from dovetail.run.actor_weights import ActorWeights


def send(weights: ActorWeights, *, fails: bool = False, arrives: bool = False) -> int:
    """The version that is sent."""
    sent = -1
    try:
        with weights.sending(lambda version: arrives) as sent:
            if fails:
                raise ConnectionError
    except ConnectionError:
        pass
    return sent


def test_the_first_version_is_1_and_only_moved_weights_are_another() -> None:
    weights = ActorWeights()
    assert weights.stale
    assert [send(weights), send(weights)] == [1, 1]
    assert not weights.stale
    weights.updated("critic")
    assert not weights.stale
    weights.updated("actor")
    assert weights.stale
    assert send(weights) == 2
    assert (weights.version, weights.moved, weights.stale) == (2, False, False)


@pytest.mark.parametrize(("arrives", "number"), [(True, 3), (False, 2)])
def test_a_number_that_reached_a_receiver_is_given_to_no_other_weights(
    arrives: bool, number: int
) -> None:
    weights = ActorWeights()
    send(weights)
    weights.updated("actor")
    assert send(weights, fails=True, arrives=arrives) == 2
    assert weights.stale
    weights.updated("actor")
    assert send(weights) == number


def test_a_resumed_run_has_sent_nothing_yet() -> None:
    before, after = ActorWeights(), ActorWeights()
    send(before)
    after.load_state(before.state())
    assert (after.version, after.moved, after.stale) == (1, False, True)
    assert send(after) == 1
