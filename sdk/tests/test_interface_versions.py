"""Versions of interfaces: a change needs a new version, and plugins of the previous version work."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys

import numpy as np
import pytest

from dovetail.interfaces import (
    BaseRollout,
    Completion,
    FinishReason,
    PluginContext,
    RolloutRequest,
    SamplingParams,
)
from dovetail.plugins.contract import check_api, check_class
from dovetail.plugins.kinds import KINDS
from dovetail.random_streams import SampleStream
from dovetail.sections import RolloutSection
from dovetail_rollouts import RolloutPool
from dovetail_sdk.check.signatures import differences
from dovetail_sdk.interfaces import bump, changes, describe_all, missing_bumps, read

COMMITTED = read()


def test_every_change_of_an_interface_has_the_version_that_it_needs_and_is_described():
    now = describe_all()
    complaints = missing_bumps(COMMITTED, now)
    assert not complaints, "\n".join(complaints)
    assert now == COMMITTED, "write the description anew: python -m dovetail_sdk interfaces"


def changed(kind: str, *path: str | int, to: object = None, drop: bool = False) -> dict:
    """The committed description of an interface with one change."""
    described = copy.deepcopy(COMMITTED["interfaces"][kind])
    place = described
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return described


ABORT = ["methods", "abort"]


def aborts(declared: str) -> dict:
    return changed("rollout", *ABORT, "declared", to=declared)


def new(declared: str, *, required: bool) -> dict:
    return {"declared": declared, "required": required}


@pytest.mark.parametrize(
    ("after", "needs", "words"),
    [
        (changed("rollout", *ABORT, drop=True), "major", "method abort is gone"),
        (changed("rollout", *ABORT, "required", to=False), "minor", "method abort was"),
        (changed("rollout", "methods", "metrics", "required", to=True), "major", "method metrics was"),
        (aborts("async abort(request_ids: Sequence[str]) -> int"), "major", "method abort was"),
        (aborts("abort(request_ids: Sequence[str]) -> None"), "major", "method abort was"),
        (aborts("async abort() -> None"), "major", "method abort was"),
        (aborts("async abort(request_ids: Sequence[str], *, word: str = a) -> None"), "minor", "abort was"),
        (aborts("async abort(request_ids: Sequence[str], *, word: str) -> None"), "major", "abort was"),
        (aborts("async abort(request_ids: Sequence[str], word: str = a) -> None"), "major", "abort was"),
        (changed("rollout", "methods", "new", to=new("new()", required=False)), "minor", "method new is new"),
        (changed("rollout", "methods", "new", to=new("new()", required=True)), "major", "method new is new"),
        (changed("rollout", "attributes", "unit", to={"declared": "unit: str", "required": True}), "major", "unit is new"),
        (changed("rollout", "types", "Completion", "log_probs", drop=True), "major", "Completion's log_probs is gone"),
        (changed("rollout", "types", "Completion", "x", to={"declared": "x: int", "required": False}), "minor", "Completion's x is new"),
        (changed("rollout", "types", "PauseMode", drop=True), "major", "PauseMode is gone"),
    ],
)  # fmt: skip
def test_a_change_needs_a_version_and_says_which(after, needs, words):
    before = COMMITTED["interfaces"]["rollout"]
    [change] = changes(before, after)
    assert (change.needs, words in change.text) == (needs, True), change
    whole = {**COMMITTED, "interfaces": {**COMMITTED["interfaces"], "rollout": after}}
    [complaint] = missing_bumps(COMMITTED, whole)
    assert "interface rollout" in complaint
    assert f"need a new {needs} version" in complaint
    major, minor = map(int, before["api"].split("."))
    raised = {"minor": f"{major}.{minor + 1}", "major": f"{major + 1}.0"}[needs]
    whole["interfaces"]["rollout"] = {**after, "api": raised}
    assert missing_bumps(COMMITTED, whole) == []


def test_a_hook_that_loses_an_argument_needs_a_major_version():
    hooks = {**COMMITTED["hooks"]["hooks"], "step_finished": ["step"]}
    after = {**COMMITTED, "hooks": {**COMMITTED["hooks"], "hooks": hooks}}
    assert missing_bumps(COMMITTED, after) == [
        "the changes of the hooks need a new major version: the hook step_finished takes other arguments"
    ]


def test_versions_move_as_said():
    assert [bump("1.1", v) for v in ("1.1", "1.2", "1.10", "2.0")] == ["none", "minor", "minor", "major"]  # fmt: skip


def test_the_description_is_the_same_in_every_process():
    ask = "import json; from dovetail_sdk.interfaces import describe_all; print(json.dumps(describe_all()))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == COMMITTED


class RolloutOf10(BaseRollout):
    """As plugins for version 1.0 of the interface were written: no `score`, no `metrics`, no `keep_weights`."""

    name = "of_1_0"
    api = ">=1.0,<2"
    Config = RolloutSection

    async def submit(self, request):
        for sample in range(request.n):
            yield Completion(
                request_id=request.request_id,
                sample=sample,
                response_ids=np.array([sample]),
                finish_reason=FinishReason.STOP,
                weight_versions=np.array([0]),
            )

    async def abort(self, request_ids):
        pass

    async def pause(self, mode=None):
        pass

    async def resume(self):
        pass

    def receive_weights(self, version, manifest):
        pass

    def sleep(self, tags):
        return 0


def test_a_plugin_made_for_the_minor_version_before_passes_every_gate_and_works():
    kind = KINDS["rollout"]
    check_api(RolloutOf10.api, kind, "of_1_0")
    check_class(RolloutOf10, kind, "of_1_0")
    assert differences(RolloutOf10, BaseRollout) == []

    async def run() -> list[Completion]:
        pool = RolloutPool([RolloutOf10(RolloutSection(name="of_1_0"), PluginContext())])
        request = RolloutRequest(
            request_id="r",
            prompt_ids=np.array([1]),
            sampling=SamplingParams(max_new_tokens=1),
            streams=tuple(SampleStream(seed=1, prompt=0, sample=s) for s in range(3)),
        )
        return [completion async for completion in pool.submit(request)]

    assert sorted(completion.sample for completion in asyncio.run(run())) == [0, 1, 2]
    replica = RolloutOf10(RolloutSection(name="of_1_0"), PluginContext())
    assert replica.metrics() == {}
    assert "discards_weights" not in replica.capabilities
    assert replica.sleep(frozenset({"kv_cache"})) == 0
