"""Worker groups over Ray: the processes of workers, their context, and results as from one process."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.errors import ColumnError, DispatchError, NumericsError, WorkerError
from dovetail.random_streams import stream_seed
from dovetail.telemetry import logging, read_rows
from dovetail.workers import RankFailure
from dovetail_runtime_ray.pool import RayGroup
from dovetail_runtime_ray.runtime import RayRuntime


@attrs.frozen
class Two:
    """A runtime with two roles over two processes."""

    runtime: RayRuntime
    actor: Any
    ref: Any
    directory: Path


@pytest.fixture(scope="module")
def two(probes: Any, start_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Two:
    directory = tmp_path_factory.mktemp("run")
    runtime = start_for_module(
        probes.pool("actor", "ref", ranks=2),
        run_directory=directory,
        env_vars={"DOVETAIL_PROBE": "${PATH}:yes"},
        cpus_per_worker=1,
        timeline=str(directory / "further" / "timeline.json"),
    )
    told = {"tokenizer": {"a": 1}, "reward_functions": threading.Lock()}
    actor = probes.group(runtime, "actor", **told)
    return Two(runtime, actor, probes.group(runtime, "ref", **told), directory)


def test_roles_of_a_pool_share_processes_and_one_process_group(two: Two) -> None:
    actor, ref = two.actor.where().result(), two.ref.where().result()
    assert [w["pid"] for w in actor] == [w["pid"] for w in ref]
    assert len({w["pid"] for w in actor} | {os.getpid()}) == 3
    assert [(w["rank"], w["world"]) for w in actor] == [(0, 2), (1, 2)]
    assert {w["role"] for w in actor} == {"actor"}
    assert {w["role"] for w in ref} == {"ref"}


def test_workers_are_told_what_they_need_and_no_more(two: Two) -> None:
    for where in two.actor.where().result():
        assert where["cwd"] == str(Path.cwd())
        assert where["tokenizer"] == {"a": 1}
        assert where["rewards"] is None
        assert (where["threads"], where["omp"]) == (1, "1")
        assert where["environment"].endswith(":yes")
        assert "${" not in where["environment"]
        assert where["device"] == "cpu"


def test_what_a_worker_draws_from_torch_follows_the_seed_and_the_rank(two: Two) -> None:
    for rank, where in enumerate(two.actor.where().result()):
        seed = stream_seed(0, "torch", "process", "actor-ref", rank)
        generator = torch.Generator().manual_seed(seed)
        assert where["drawn"] == float(torch.rand((), dtype=torch.float64, generator=generator))


def test_batches_are_divided_over_ranks_and_come_back_in_order(two: Two) -> None:
    lengths = [5, 1, 9, 2, 7, 3, 4]
    ids = Ragged.from_list([np.full(n, n, dtype=np.int64) for n in lengths])
    batch = Batch({"ids": ids, "response_ids": ids, "prompt_ids": ids})
    result = two.actor.forward(batch, frozenset()).result()
    assert result["ids"].equals(ids)
    assert set(np.asarray(result["rank"]).tolist()) == {0, 1}
    metrics = two.actor.update(batch, None).result()
    assert metrics["samples"].value == len(lengths)


def test_results_that_nobody_reads_are_not_sent(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = RayGroup(
        two.actor.worker_class, Mesh.over(2, cp=2), "actor", two.actor._processes, two.actor._codec
    )
    came: list[list[Any]] = []
    decode = pair._codec.decode_results
    monkeypatch.setattr(pair._codec, "decode_results", lambda r: came.append(list(r)) or decode(r))
    ids = Ragged.from_list([np.arange(n) for n in (3, 1, 2)], dtype=np.int64)
    batch = Batch({"ids": ids, "response_ids": ids, "prompt_ids": ids})
    result = pair.forward(batch, frozenset()).result()
    assert result["ids"].equals(ids)
    assert set(np.asarray(result["rank"]).tolist()) == {0}
    assert [answer is None for answer in came.pop()] == [False, True]
    assert pair.update(batch, None).result()["samples"].value == 3
    assert [answer is None for answer in came.pop()] == [False, True]
    # If the dispatch mode reads all ranks, each sends its result. A failure is sent even by a rank that is not read.
    assert pair.pause_for(0.0).result() == [0, 1]
    with pytest.raises(ColumnError, match="no column 'ids'"):
        pair.forward(batch.drop(["ids"]), frozenset()).result()
    answers = came.pop()
    assert all(isinstance(answer, RankFailure) for answer in answers)


def test_ranks_sum_over_real_processes(two: Two) -> None:
    assert two.actor.summed(2.0).result() == [6.0, 6.0]


def test_modes_reach_the_ranks_that_they_name(two: Two) -> None:
    assert two.actor.weight_manifest(7).result() == 7
    assert two.actor.echo(["a", "b"]).result() == ["a", "b"]


def test_a_future_can_be_asked_again_after_a_timeout(two: Two, tmp_path: Path) -> None:
    future = two.actor.pause_until(tmp_path / "go on")
    assert not future.done()
    with pytest.raises(TimeoutError, match=r"actor.pause_until\(\): ranks \[0, 1\] of 2"):
        future.result(timeout=0.05)
    (tmp_path / "go on").touch()
    assert future.result(timeout=240) == [0, 1]
    assert future.done()


def test_calls_from_several_threads_reach_all_ranks_in_one_order(two: Two) -> None:
    # Each call is a collective: in different orders on two ranks, two calls would wait forever.
    results: list[Any] = []

    def many(group: Any) -> None:
        for value in range(20):
            results.append(group.summed(float(value)).result(timeout=240) == [3.0 * value] * 2)

    threads = [threading.Thread(target=many, args=(g,)) for g in (two.actor, two.ref, two.actor)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 60


def test_own_errors_keep_their_type_and_say_where_they_are_from(two: Two) -> None:
    with pytest.raises(NumericsError, match="not finite") as caught:
        two.actor.fail("numerics", (0, 1)).result()
    assert caught.value.sample_ids == ("a",)
    notes = "\n".join(caught.value.__notes__)
    assert "actor.fail() on rank" in notes
    assert "probe_engine.py" in notes


@pytest.mark.parametrize(
    ("how", "said"),
    [("value", "rank 1 does.*like this"), ("only_here", "1 and 2"), ("unpicklable", "pickle")],
)
def test_any_other_error_becomes_one_of_the_first_failing_rank(
    two: Two, how: str, said: str
) -> None:
    with pytest.raises(WorkerError, match=said) as caught:
        two.actor.fail(how, (1,)).result()
    assert (caught.value.rank, caught.value.call) == (1, "fail")
    assert two.actor.summed(1.0).result() == [3.0, 3.0]  # the group still works


def test_what_workers_log_is_in_files_and_their_warnings_come_back(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logging._CONTEXT, "step", 4)
    two.actor.warn().result()
    heard = two.runtime.context.logger.events
    for event in ("the probe is worried", "a library is worried"):
        assert sorted((f["role"], f["rank"]) for e, f in heard if e == event) == [
            ("actor", 0),
            ("actor", 1),
        ]
    assert all(f["where"] == "actor.warn()" for _, f in heard)
    logged = {row["event"]: row for row in read_rows(two.directory / "logs" / "actor-ref-1.jsonl")}
    run = "/".join(two.directory.parts[-2:])
    for event, logger in (
        ("the probe is worried", "dovetail"),
        ("a library is worried", "some.library"),
    ):
        expected = {"run": run, "step": 4, "role": "actor", "rank": 1, "logger": logger}
        assert logged[event].items() >= expected.items()
    assert logged["probe started"]["role"] == "ref"
    assert "printed by" in (two.directory / "logs" / "actor-ref-1.out").read_text()


def test_a_start_that_fails_on_one_rank_raises_its_error(two: Two, probes: Any) -> None:
    with pytest.raises(ValueError, match="rank 1 finds no model") as caught:
        two.runtime.worker_group(probes.engine("ref", "BrokenEngine"), Mesh(dp=2))
    assert "ref.start() on rank 1 of 2 (pid" in "\n".join(caught.value.__notes__)


def test_a_group_needs_a_pool_of_its_size(two: Two, probes: Any) -> None:
    with pytest.raises(DispatchError, match="expected 2, the number of workers"):
        two.runtime.worker_group(probes.engine("actor"), Mesh(dp=3))
    with pytest.raises(DispatchError, match="was placed for the role 'critic'"):
        two.runtime.worker_group(probes.engine("critic"), Mesh(dp=2))


def test_a_timeline_names_calls_and_ranks(two: Two) -> None:
    two.actor.summed(1.0).result()
    two.runtime.before_exit()
    events = json.loads((two.directory / "further" / "timeline.json").read_text())
    calls = {(event["name"], event["tid"]) for event in events}
    assert {("actor.summed()", f"actor+ref rank {rank}") for rank in (0, 1)} <= calls
