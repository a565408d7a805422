"""The replica that failed first is not one that was only notified of another's failure."""

from __future__ import annotations

from dovetail.errors import CalledOffError, RolloutError
from dovetail_rollouts.replica_states import ReplicaFault
from dovetail_rollouts.weight_sync import FirstFailure


def test_who_was_told_that_it_is_called_off_is_not_the_first() -> None:
    reasons: list[str] = []
    first = FirstFailure(reasons.append, None)
    told = ReplicaFault(number=0, error=CalledOffError("called off: out of memory"))
    cause = ReplicaFault(number=1, error=RolloutError("out of memory"))
    for fault in (told, cause):
        first.heard(fault.error)
    assert reasons == ["out of memory"]
    assert first.causes([told, cause]) == (cause,)
