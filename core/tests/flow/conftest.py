"""Samples made by hand, for the rooms that work on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dovetail.data.loader import Issued
from dovetail.flow.generation import Sample
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.reward import Failure, FailureKind, Score
from dovetail.interfaces.rollout import Completion, FinishReason

MakeSample = Callable[..., Sample]


@pytest.fixture(scope="session")
def make_sample() -> MakeSample:
    """A function that makes a sample of a group; a score of None is a failure to score it."""

    def make(
        group: int, number: int = 0, score: float | None = 0.0, *, length: int = 3, epoch: int = 0
    ) -> Sample:
        name = f"train.e{epoch}.p{group}.a0"
        failure = Failure(kind=FailureKind.TIMEOUT, message="too slow")
        return Sample(
            sample_id=f"{name}.s{number}",
            issued=Issued(
                epoch=epoch,
                attempt=0,
                prompt=Prompt(index=group, prompt_ids=np.arange(2), raw=f"prompt {group}"),
            ),
            group=group,
            completion=Completion(
                request_id=name,
                sample=number,
                response_ids=np.arange(length),
                finish_reason=FinishReason.STOP,
                weight_versions=np.zeros(length, dtype=np.int64),
            ),
            text=f"response {number}",
            outcome=failure if score is None else Score(value=score),
        )

    return make
