"""Programs in processes of the Ray runtime, on a cluster of two nodes: they reach the gateway, share nodes, and end with their episode."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dovetail_gateway", reason="programs are a plugin of their own")
from gateway_episodes import config_of, draw, said

from dovetail.errors import PlacementError
from dovetail.interfaces import EpisodeError, Failure, PluginContext
from dovetail.sections import Pool
from dovetail.workers.inline import InlineConfig, InlineRuntime
from dovetail_gateway.config import ProgramPlacement
from dovetail_gateway.placement import PlacedPrograms
from dovetail_gateway.program import ProgramRun
from dovetail_gateway.program_loop import ProgramLoop
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.runtime import RayRuntime
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

CLIENT = """
import json, os, signal, subprocess, sys, time, urllib.request
def ask():
    body = json.dumps({"model": "policy", "messages": json.loads(os.environ["DOVETAIL_ROW"])["prompt"]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))
def worker():
    # The process of the runtime that this program descends from.
    process = os.getpid()
    while not open(f"/proc/{process}/comm").read().startswith("ray::"):
        process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
    return process
began = time.time()
ask()
"""
CHILD = """
subprocess.Popen([sys.executable, "-c", "import os, time; os.fork(); time.sleep(271)"], start_new_session=True)
time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def runtime(no_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A runtime on two nodes of two CPUs, with one pool that takes one CPU; the gateway has the first node's address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    context = PluginContext(run_directory=tmp_path_factory.mktemp("run"))
    made = RayRuntime(RayConfig(name="ray", address=cluster.address), context)
    try:
        made.start()
        made.place([Pool(name="all", roles=("actor",))])
        yield made
    finally:
        made.close()
        cluster.shutdown()


def run(runtime: Any, folder: Path, source: str, n: int = 1, **settings: Any) -> Any:
    """Run episodes of a program in two processes of the runtime, and return them."""
    if isinstance(runtime, RayRuntime):  # resources of the previous test become free late
        assert soon(lambda: sum(n.free.get("CPU", 0) for n in runtime._cluster.nodes()) == 3)
    script = folder / "agent.py"
    script.write_text(CLIENT + source)
    settings.setdefault("placement", ProgramPlacement(workers=2, cpus=1))
    context = PluginContext(
        tokenizer=template_tokenizer(CHATML), run_directory=folder, runtime=runtime
    )
    loop = ProgramLoop(config_of(command=f"{sys.executable} {script}", **settings), context)
    loop.start()
    try:
        drawn = draw(loop, said("one"), n=n)
        assert loop._gateway is not None
        assert loop._gateway.url.startswith(f"http://{runtime.address()}:")
        drawn.audit()
        return drawn
    finally:
        loop.close()


def left(mark: str) -> list[bytes]:
    """The command lines of processes that contain a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((place / "cmdline").read_bytes())
    return [line for line in found if mark.encode() in line]


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_programs_are_shared_out_over_the_processes_and_no_more_run_than_may(
    runtime: Any, tmp_path: Path
) -> None:
    source = """
time.sleep(1)
json.dump([worker(), began, time.time()], open(os.environ["DOVETAIL_OUTPUT_FILE"], "w"))
"""
    drawn = run(runtime, tmp_path, source, n=6, concurrency=2)
    assert all(sample.score == 1 for sample in drawn.samples)
    spans = [sample.trajectory.output for sample in drawn.samples]
    together = [sum(b <= at < e for _, b, e in spans) for _, at, _ in spans]
    assert max(together) == 2
    assert len({worker for worker, _, _ in spans}) == 2
    assert os.getpid() not in {worker for worker, _, _ in spans}
    assert not list((tmp_path / "programs").iterdir())


def test_children_of_a_program_end_with_its_episode(runtime: Any, tmp_path: Path) -> None:
    assert run(runtime, tmp_path, CHILD).sample.score == 1
    assert not left("time.sleep(271)")


def test_a_program_that_takes_too_long_is_ended_on_its_machine(
    runtime: Any, tmp_path: Path
) -> None:
    drawn = run(runtime, tmp_path, f"{CHILD}\ntime.sleep(271)", program_seconds=3)
    assert isinstance(drawn.sample.outcome, Failure)
    assert "program_seconds" in drawn.sample.outcome.message
    assert not left("time.sleep(271)")


def test_a_lost_process_fails_its_programs_and_is_started_again(
    runtime: Any, tmp_path: Path
) -> None:
    """The first program kills the process that started it, as a machine without free memory does."""
    source = f"""{CHILD}
if not os.path.exists("{tmp_path / "lost"}"):
    open("{tmp_path / "lost"}", "w").close()
    os.kill(worker(), signal.SIGKILL)
    time.sleep(271)
"""
    drawn = run(runtime, tmp_path, source, n=4, concurrency=1)
    failed = [sample.outcome for sample in drawn.samples if isinstance(sample.outcome, Failure)]
    assert len(failed) == 1
    assert "died" in failed[0].message
    assert soon(lambda: not left("time.sleep(271)"))


def test_programs_end_where_the_runtime_ends_their_process(runtime: Any, tmp_path: Path) -> None:
    source = f"import os, subprocess, sys, time\n{CHILD}\nopen('begun', 'w')\ntime.sleep(271)"
    run = ProgramRun([sys.executable, "-c", source], str(tmp_path), {}, 1 << 20, 9)

    async def lost() -> None:
        placed = PlacedPrograms(runtime, ProgramPlacement(workers=1))
        running = asyncio.ensure_future(placed.run(run, asyncio.Event()))
        assert await asyncio.to_thread(soon, (tmp_path / "begun").exists)
        placed._workers[0].kill()
        with pytest.raises(EpisodeError, match=r"programs worker 0 .* was ended"):
            await running
        placed.close()

    asyncio.run(lost())
    assert soon(lambda: not left("time.sleep(271)"))


def test_more_cpus_than_are_free_are_refused_before_an_episode(
    runtime: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        PlacementError, match=r"process of programs \(in all 2\), which needs 64 CPU"
    ):
        run(runtime, tmp_path, "", placement=ProgramPlacement(workers=2, cpus=64))


def test_a_runtime_without_processes_is_refused(tmp_path: Path) -> None:
    inline = InlineRuntime(InlineConfig(name="inline"), PluginContext())
    with pytest.raises(PlacementError, match="'inline'"):
        run(inline, tmp_path, "")
