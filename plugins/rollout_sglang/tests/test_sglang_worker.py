"""A scheduler's part in an update, without SGLang: a failing rank cancels the update, and the error names the rank."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dovetail.errors import CalledOffError
from dovetail.interfaces import WeightManifest
from dovetail_rollout_sglang import worker as module
from dovetail_rollout_sglang.adapters import Adapters
from dovetail_rollout_sglang.worker import SchedulerWorker
from dovetail_serving import Outcome, WeightEnd, manifest_info


def test_a_rank_that_fails_calls_the_update_off_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons: list[str] = []
    transport: Any = SimpleNamespace(
        receiver=lambda: None, call_off=lambda manifest, reason: reasons.append(reason)
    )
    first = Outcome.of_failure(CalledOffError("told so"), changed=False)

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [(first, 3), mine]

    both = SimpleNamespace(get_world_size=lambda group: 2, all_gather_object=gather)
    monkeypatch.setattr(module, "dist", both)
    rank = SchedulerWorker(nn.Linear(1, 1), group=None, adapters=Adapters(None))
    rank._end = WeightEnd(transport)
    manifest = manifest_info(WeightManifest(version=1, kind="delta", tensors=()))
    command = {"do": "load", "manifest": manifest, "adapter": None, "in_force": None}
    told = json.loads(rank.answer(json.dumps(command).encode()))
    assert "delta" in reasons[0]
    assert told["error"] == f"{reasons[0]} in rank 1"
    assert not told["called_off"]
    assert told["free_bytes"] == 3
