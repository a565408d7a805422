"""A role's forward pass: in the first step, the engine's result is compared with its interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Future
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import PlanFacts, StepContext
from dovetail.sections import ModelSection, PluginSection, RunConfig
from dovetail.telemetry.timers import Timers
from dovetail_stages.forward_pass import forward

MASK = Ragged.from_list([np.array([True, False]), np.array([True])], dtype=np.bool_)
BATCH = Batch({"response_mask": MASK})
COLUMN = MASK.with_values(np.array([-1, 0, -2], np.float32))


class Group:
    """A worker group whose forward pass gives these columns."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Future[Batch]:
        return Future.completed(Batch(dict(self.columns), length=len(batch)))


def step_of(group: Group, *, first: bool = True) -> StepContext:
    engine: Any = SimpleNamespace(config=PluginSection(name="fsdp2"))
    config = RunConfig(model=ModelSection(path="nowhere"))
    return StepContext(
        number=1,
        facts=PlanFacts(config=config, plugins={"actor.engine": engine}, updates_per_step=1),
        roles={"ref": group},  # type: ignore[dict-item]
        plugins={},
        logger=logging.getLogger(__name__),
        timer=Timers(),
        first=first,
    )


def test_columns_get_the_names_that_are_asked_for() -> None:
    step = step_of(Group({"log_probs": COLUMN, "entropies": COLUMN}))
    scored = forward(BATCH, step, "ref", {"ref_log_probs": "log_probs"})
    assert scored.names == ("response_mask", "ref_log_probs")
    assert scored["ref_log_probs"].equals(COLUMN)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "returned no column 'log_probs'"),
        ({"log_probs": MASK.with_values(np.zeros(3))}, "as float64 [T], not float32 [T]"),
        ({"log_probs": MASK.with_values(np.full(3, -1, np.float32))}, "on 1 masked tokens"),
        ({"log_probs": Ragged.from_list([[0.0], [0.0]], dtype=np.float32)}, "for 2 tokens"),
    ],
)
def test_what_an_engine_got_wrong_is_named(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(PluginBrokenError, match="engine/fsdp2") as caught:
        forward(BATCH, step_of(Group(columns)), "ref", {"ref_log_probs": "log_probs"})
    assert words in str(caught.value)


def test_after_the_first_step_nothing_is_looked_at() -> None:
    wrong = MASK.with_values(np.full(3, -1, np.float32))
    step = step_of(Group({"log_probs": wrong}), first=False)
    assert forward(BATCH, step, "ref", {"ref_log_probs": "log_probs"})["ref_log_probs"] is wrong
