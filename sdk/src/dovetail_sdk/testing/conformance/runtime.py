"""The suites of runtimes and dispatch modes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.dispatch import Mesh
from dovetail.errors import DispatchError
from dovetail.interfaces import (
    BaseRollout,
    Call,
    DispatchMode,
    PluginContext,
    PluginRef,
    RolloutRequest,
    Runtime,
    SamplingParams,
    WorkerSpec,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import Pool
from dovetail_sdk.testing.conformance import runtime_workers
from dovetail_sdk.testing.conformance.plugin import PluginConformance


class RuntimeConformance(PluginConformance):
    """Conformance suite for runtimes, with workers that need no model: subclass it and set `plugin`."""

    kind = "runtime"
    plugin: ClassVar[type[Runtime]]

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls) -> Iterator[Runtime]:
        """Yield a started runtime with room for two replicas. All tests share the runtime because starting it may be slow."""
        runtime = cls().placed()
        yield runtime
        runtime.close()

    @pytest.fixture(scope="class")
    @classmethod
    def replicas(cls, runtime: Runtime) -> list[BaseRollout]:
        """Return two rollout replicas on the runtime."""
        return runtime.rollout_replicas(cls().spec("rollout", "EchoRollout"), 2)

    def placed(self) -> Runtime:
        """Return a started runtime with a pool of two CPU ranks for the suite's replicas."""
        runtime: Runtime = self.make()
        runtime.start()
        runtime.place([Pool(name="suite", roles=("rollout",), ranks_per_node=2)])
        return runtime

    def spec(self, kind: str, attribute: str) -> WorkerSpec:
        """Return the spec of a worker group; its workers are plugins of this kind, of class `attribute` in the module `runtime_workers`."""
        ref = PluginRef(
            kind=kind, name=attribute, path=runtime_workers.__file__, attribute=attribute
        )
        return WorkerSpec(role="rollout", plugin=ref, context=PluginContext(seed=7))

    def test_it_says_on_which_device_workers_are(self, runtime: Runtime) -> None:
        assert runtime.device().partition(":")[0]

    def test_replicas_generate_and_know_their_number(self, replicas: list[BaseRollout]) -> None:
        found = [asyncio.run(_echoed(replica)) for replica in replicas]
        assert found == [[7, 0, 5, 6], [7, 1, 5, 6]]

    def test_a_replica_is_started_again_in_its_place(
        self, runtime: Runtime, replicas: list[BaseRollout]
    ) -> None:
        if type(runtime).restart_replica is Runtime.restart_replica:
            pytest.skip("the runtime has no restart_replica, which interface version 1.2 added")
        again = runtime.restart_replica(replicas[1])
        assert [asyncio.run(_echoed(one)) for one in (replicas[0], again)] == [
            [7, 0, 5, 6],
            [7, 1, 5, 6],
        ]

    def test_closing_twice_is_no_error(self) -> None:
        runtime: Runtime = self.make()
        runtime.start()
        runtime.close()
        runtime.close()


async def _echoed(replica: Any) -> list[int]:
    request = RolloutRequest(
        request_id="r",
        prompt_ids=np.array([5, 6]),
        sampling=SamplingParams(max_new_tokens=8),
        streams=(SampleStream(seed=1),),
    )
    [completion] = [found async for found in replica.submit(request)]
    return completion.response_ids.tolist()


class DispatchModeConformance(PluginConformance):
    """Conformance suite for dispatch modes, which split the arguments of a call over ranks: subclass it and set `plugin`.

    The tests use meshes of several shapes.
    """

    kind = "dispatch_mode"
    plugin: ClassVar[type[DispatchMode]]
    meshes: ClassVar[tuple[Mesh, ...]] = (
        Mesh(dp=1, name="train"),
        Mesh(dp=3, name="train"),
        Mesh(dp=2, tp=2, name="train"),
    )
    """Meshes that the mode can serve."""

    def arguments(self, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call, which the mode splits over the ranks of this mesh."""
        return ("words",), {"number": 3}

    def split(self, mode: DispatchMode, mesh: Mesh) -> tuple[list[Call | None], Any]:
        """Return the mode's split of the suite's arguments: a call per rank (None for a rank that is not called), and the receipt.

        The receipt is a value of the mode that its `collect` gets together with the results. If the mode refuses the arguments, the test
        is skipped.
        """
        try:
            return mode.split(mesh, *self.arguments(mesh))
        except DispatchError as error:
            pytest.skip(
                f"the dispatch mode refuses the suite's arguments ({error.message}); override `arguments` in a suite"
            )

    def expected(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """Return the expected result of the mode's `collect` for these results of the ranks.

        By default `...`, which accepts every result, so that a test fails only if `collect` raises an error or uses results of ranks
        that do not answer.
        """
        return ...

    def test_there_is_a_call_or_none_for_every_rank(self) -> None:
        for mesh in self.meshes:
            calls, _ = self.split(self.make(), mesh)
            assert len(calls) == mesh.size
            assert any(call is not None for call in calls)
            for call in calls:
                assert call is None or (isinstance(call[0], tuple) and isinstance(call[1], dict))

    def test_the_ranks_that_answer_are_called(self) -> None:
        for mesh in self.meshes:
            mode: DispatchMode = self.make()
            calls, _ = self.split(mode, mesh)
            answering = mode.answering(mesh)
            assert answering <= set(range(mesh.size))
            if len(answering) < mesh.size:
                assert all(calls[rank] is not None for rank in answering)

    def test_results_of_ranks_that_do_not_answer_are_not_read(self) -> None:
        for mesh in self.meshes:
            mode: DispatchMode = self.make()
            calls, receipt = self.split(mode, mesh)
            whole = [None if call is None else f"result {r}" for r, call in enumerate(calls)]
            answering = mode.answering(mesh)
            thinned = [result if r in answering else None for r, result in enumerate(whole)]
            collected = mode.collect(mesh, thinned, receipt)
            assert collected == mode.collect(mesh, whole, receipt)
            expected = self.expected(mesh, whole)
            assert expected is ... or collected == expected
