"""Real vLLM servers: the conformance suite on a server that a replica starts and on a joined one, and servers that die."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import RolloutError
from dovetail.interfaces import (
    BaseRollout,
    FinishReason,
    PluginContext,
    RolloutRequest,
    SamplingParams,
)
from dovetail.metrics import Metric
from dovetail.random_streams import SampleStream
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollout_vllm.server_command import command_by_hand
from dovetail_rollout_vllm.versions import VLLM
from dovetail_rollouts import RolloutPool
from dovetail_sdk.testing.conformance import RolloutConformance
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.scripted_rollout import answers
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_serving import ServerProcess, free_port
from dovetail_transports.config import SharedMemoryConfig

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here"),
]

CONFIG = VllmRolloutConfig(name="vllm", mode="server", enforce_eager=True, max_model_len=4096)
TOKEN = "known to both"
BY_HAND = {
    TOKEN_VARIABLE: TOKEN,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@attrs.frozen
class ByHand:
    """A server that was started from the command line."""

    process: ServerProcess
    url: str


class TestVllmServer(RolloutConformance):
    plugin = VllmRollout
    config = CONFIG
    weight_transport = SharedMemoryConfig(name="shared_memory", timeout=60.0)

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Heads of 32: vLLM has no smaller ones on a CPU."""
        directory = tmp_path_factory.mktemp("served") / "tiny"
        return tiny_model_and_tokenizer(directory, vocab_size=300, hidden_size=128)

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        """The engine that is updated serves all cases: starting one takes longer than all of them."""
        return fresh

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def by_hand(cls, model_directory: Path) -> Iterator[ByHand]:
        """Started before the first case, so that both servers start at the same time."""
        port = free_port()
        context = PluginContext(
            model=suite_model(model_directory), run_directory=model_directory.parent
        )
        python, *arguments = shlex.split(command_by_hand(CONFIG, context, port=port))
        assert python == "python"
        process = ServerProcess(
            [sys.executable, *arguments],
            log=model_directory.parent / "by_hand.log",
            environment=BY_HAND,
        )
        yield ByHand(process, f"http://127.0.0.1:{port}")
        process.close()

    @pytest.fixture(scope="class")
    @classmethod
    def joined(cls, by_hand: ByHand, model_directory: Path) -> Iterator[BaseRollout]:
        """A replica that has joined the server which was started by hand."""
        wait_until_healthy(by_hand)

        class Joining(TestVllmServer):
            config = attrs.evolve(CONFIG, urls=(by_hand.url,))

        suite = Joining()
        os.environ[TOKEN_VARIABLE] = TOKEN
        try:
            engine = suite.start(model_directory)
        finally:
            del os.environ[TOKEN_VARIABLE]
        yield engine
        suite.close(engine)

    def test_weights_reach_a_joined_server_which_stays_when_its_rollout_is_closed(
        self, joined: BaseRollout, by_hand: ByHand, changed: PlainModel, model_directory: Path
    ) -> None:
        version = self.update(joined, changed)
        answer = self.greedy(joined, 1)
        assert answer.weight_versions.tolist() == [version] * 8
        assert (
            answer.response_ids.tolist() == changed.greedy((11, 12, 13, 14, 15, 16, 17), 8).tolist()
        )
        os.environ[TOKEN_VARIABLE] = TOKEN
        try:
            other = VllmRollout(
                attrs.evolve(CONFIG, urls=(by_hand.url,)),
                PluginContext(model=suite_model(model_directory), weights_follow=True),
            )
            other.start()
            other.close()
            builds_on_it = VllmRollout(
                attrs.evolve(CONFIG, urls=(by_hand.url,)),
                PluginContext(model=suite_model(model_directory)),
            )
            with pytest.raises(
                RolloutError,
                match=rf"holds update {version} of another run(?s:.*){TOKEN_VARIABLE}=",
            ):
                builds_on_it.start()
        finally:
            del os.environ[TOKEN_VARIABLE]
        assert by_hand.process.exit_status is None
        assert self.greedy(joined, 1).response_ids.tolist() == answer.response_ids.tolist()

    def test_only_who_knows_the_token_joins(
        self, joined: BaseRollout, by_hand: ByHand, model_directory: Path
    ) -> None:
        stranger = VllmRollout(
            attrs.evolve(CONFIG, urls=(by_hand.url,)),
            PluginContext(model=suite_model(model_directory)),
        )
        with pytest.raises(RolloutError, match="requires another access token"):
            stranger.start()

    def test_a_server_that_is_killed_loses_no_sample_and_doubles_none(
        self, fresh: BaseRollout, joined: BaseRollout
    ) -> None:
        pool = RolloutPool([fresh, joined])
        requests = [
            RolloutRequest(
                request_id=f"p{p}",
                prompt_ids=np.array([5 + p, 6, 7]),
                # The first request of each replica is short and may end before the kill; the long ones can't.
                sampling=SamplingParams(max_new_tokens=8 if p < 2 else 600, ignore_eos=True),
                streams=tuple(SampleStream(seed=1, prompt=p, sample=s) for s in range(2)),
            )
            for p in range(8)
        ]
        victim: Any = fresh

        async def act() -> list[Any]:
            short = [asyncio.create_task(answers(pool, [request])) for request in requests[:2]]
            long = asyncio.create_task(answers(pool, requests[2:]))
            # Kill as soon as requests run: on a busy machine, a task that waits for a request may wake only after both replicas are done.
            while not victim._gate.running:
                assert not long.done()
                await asyncio.sleep(0.01)
            for pid in server_pids(victim):
                os.kill(pid, signal.SIGKILL)
            return [*await short[0], *await short[1], *await long]

        found = asyncio.run(act())
        assert sorted((c.request_id, c.sample) for c in found) == [
            (f"p{p}", s) for p in range(8) for s in range(2)
        ]
        assert all(c.finish_reason is FinishReason.LENGTH for c in found)
        lengths = {c.request_id: len(c.response_ids) for c in found}
        assert lengths == {f"p{p}": 8 if p < 2 else 600 for p in range(8)}
        assert not victim._backend.alive()
        with pytest.raises(RolloutError, match=r"the server at .* ended with status"):
            self.generate(fresh, self.request(0))
        assert victim.metrics() == dict[str, Metric]()

    def test_an_engine_that_dies_inside_its_server_ends_all_requests(
        self, joined: BaseRollout, by_hand: ByHand
    ) -> None:
        async def act() -> Any:
            long = self.request(0, n=4, max_new_tokens=self.long_response)
            work = asyncio.create_task(_all(joined, long))
            while joined._gate.running < 4:  # type: ignore[attr-defined]
                assert not work.done(), work
                await asyncio.sleep(0)  # a tiny model may end within any pause
            for pid in engine_pids(by_hand.process):
                os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(work, return_exceptions=True)

        (error,) = asyncio.run(act())
        assert isinstance(error, RolloutError)
        assert f"vLLM has died: the server at {by_hand.url}" in error.message
        assert not joined.alive()


async def _all(engine: BaseRollout, request: RolloutRequest) -> list[Any]:
    return [completion async for completion in engine.submit(request)]


def suite_model(directory: Path) -> Any:
    """The model's section."""
    from dovetail.sections import ModelSection

    return ModelSection(path=str(directory), dtype="float32")


def wait_until_healthy(server: ByHand) -> None:
    import httpx2

    deadline = time.monotonic() + 500
    while server.process.exit_status is None and time.monotonic() < deadline:
        try:
            if httpx2.get(f"{server.url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(server.process.log.read_text()[-3000:])


def server_pids(rollout: Any) -> list[int]:
    """The processes of a replica's own server, but for the guards that watch over them."""
    (guard,) = children(rollout._backend._own._process._guard.pid)
    return children(guard)


def engine_pids(process: Any) -> list[int]:
    """The engine's processes of a server."""
    (guard,) = children(process._guard.pid)
    (server,) = children(guard)
    found = [pid for pid in children(server) if "EngineCore" in name_of(pid)]
    assert found
    return found


def children(pid: int) -> list[int]:
    """Processes that a process has started, in whichever of its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
