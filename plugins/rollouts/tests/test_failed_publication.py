"""A publication that fails on some replicas."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.errors import WeightSyncError


def test_a_version_that_one_replica_took_and_another_did_not_is_never_other_weights(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compose(replicas=2, restart=lambda engine: engine)
    one, other = made.engines
    run = made.run
    with run.record.running():
        run.publish_weights()
        with run.step() as step:
            run.collect(step)
            run.learn(step)
            with monkeypatch.context() as broken:
                broken.setattr(other, "receive_weights", _refuse)
                with pytest.raises(WeightSyncError):
                    run.publish_weights()
            run.weights.updated("actor")
            run.source._sync.generated()  # allows restarts of replicas again
            run.publish_weights()
    assert one.versions == [1, 2, 2, 2, 3]
    assert other.versions == [1, 3]
    assert run.position.weight_version == 3


def test_the_same_weights_keep_their_number_when_they_are_sent_again(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compose(replicas=2, restart=lambda engine: engine)
    one, other = made.engines
    with made.run.record.running():
        with monkeypatch.context() as broken:
            broken.setattr(other, "receive_weights", _refuse)
            with pytest.raises(WeightSyncError):
                made.run.publish_weights()
        made.run.source._sync.generated()
        made.run.publish_weights()
    assert one.versions == [1, 1, 1, 1]
    assert other.versions == [1]


def _refuse(version: int, manifest: Any) -> None:
    raise WeightSyncError("no")
