"""A process of an engine that fails in an update calls the update off, and the merged outcome names this process."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.errors import CalledOffError, WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail_serving import Outcome, WeightEnd, first_failed
from dovetail_serving.backend import WeightsUntouchedError

MANIFEST = WeightManifest(version=1, tensors=())


class Noting:
    """A transport that records call-offs, and fails in them if so configured."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.reasons: list[str] = []
        self._failure = failure

    def receiver(self) -> None:
        return None

    def call_off(self, manifest: WeightManifest, reason: str) -> None:
        self.reasons.append(reason)
        if self._failure is not None:
            raise self._failure


@pytest.mark.parametrize("failure", [None, OSError("disk full")])
@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (WeightSyncError("torn"), ["torn"]),
        (ValueError("broken"), ["ValueError: broken"]),
        (CalledOffError("by another"), []),
    ],
)
def test_the_process_that_fails_calls_the_update_off(
    error: Exception, reasons: list[str], failure: Exception | None
) -> None:
    transport: Any = Noting(failure)
    with pytest.raises(type(error)) as raised, WeightEnd(transport).taking(MANIFEST):
        raise error
    assert raised.value is error
    assert transport.reasons == reasons


def test_who_failed_by_himself_is_told_of_before_who_was_called_off() -> None:
    well = Outcome(changed=True)
    off = Outcome.of_failure(CalledOffError("by another"), changed=False)
    torn = Outcome.of_failure(WeightSyncError("torn"), changed=True)
    assert first_failed([well, off, torn]) == 2
    assert first_failed([well, off]) == 1
    assert first_failed([well, well]) is None
    assert well.failure() is None
    assert isinstance(off.failure(), CalledOffError)
    assert isinstance(off.failure(), WeightsUntouchedError)
    assert not isinstance(torn.failure(), (CalledOffError, WeightsUntouchedError))
