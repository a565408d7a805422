"""Dovetail's part of a server: shared prompts, stopped processes, and names of arguments; SGLang is not needed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail_rollout_sglang.engine_args import command_by_hand
from dovetail_rollout_sglang.environment import variables
from dovetail_rollout_sglang.liveness import Liveness, stopped_descendants
from dovetail_rollout_sglang.prefixes import Prefixes
from dovetail_rollout_sglang.versions import in_this_versions_words, settle_grpc

LONG, SHORT = list(range(100)), [1, 2, 3]


class TestPrefixes:
    def order(self, prompts: Sequence[list[int]]) -> list[str]:
        """What happens in which order when a sample of each prompt comes, all together."""
        said: list[str] = []

        async def compute(prompt: Sequence[int], _: int) -> None:
            said.append(f"{len(prompt)} begins")
            await asyncio.sleep(0.01)
            said.append(f"{len(prompt)} computed")

        async def sample(prefixes: Prefixes, prompt: list[int]) -> None:
            await prefixes.shared(prompt)
            said.append(f"{len(prompt)} sampled")

        async def together() -> None:
            prefixes = Prefixes(compute)
            for _ in range(2):  # no state of the first time may be used in the second
                await asyncio.gather(*(sample(prefixes, prompt) for prompt in prompts))

        asyncio.run(together())
        half = len(said) // 2
        assert said[:half] == said[half:]
        return said[:half]

    def test_samples_of_a_prompt_wait_until_it_has_been_computed_once(self) -> None:
        assert self.order([LONG] * 3) == ["100 begins", "100 computed", *["100 sampled"] * 3]

    def test_a_sample_alone_waits_for_nothing_and_so_do_short_prompts(self) -> None:
        assert self.order([LONG]) == ["100 sampled"]
        # An equal prompt of another request does not count as the same prompt.
        assert self.order([LONG, list(LONG)]) == ["100 sampled"] * 2
        assert self.order([SHORT] * 3) == ["3 sampled"] * 3

    def test_a_prompt_whose_samples_are_all_cancelled_is_computed_no_further(self) -> None:
        ended: list[str] = []

        async def compute(*_: object) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def cancelled() -> None:
            prefixes = Prefixes(compute)
            samples = [asyncio.create_task(prefixes.shared(LONG)) for _ in range(3)]
            await asyncio.sleep(0.01)
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)
            await asyncio.sleep(0)

        asyncio.run(cancelled())
        assert ended == ["cancelled"]


class TestLiveness:
    def test_two_looks_far_apart_are_not_one_long_stop(self) -> None:
        now, stopped = 0.0, [7]
        liveness = Liveness(lambda: stopped, patience=10.0, clock=lambda: now)
        assert liveness.lost() is None
        now = 60.0
        assert liveness.lost() is None
        now = 66.0
        assert liveness.lost() is None
        now = 72.0
        assert liveness.lost() is not None

    def test_who_stands_still_for_too_long_is_lost_and_who_goes_on_is_not(self) -> None:
        now, stopped = 0.0, [7, 8]
        liveness = Liveness(lambda: stopped, patience=10.0, clock=lambda: now)
        assert liveness.lost() is None
        now, stopped = 6.0, [8]
        assert liveness.lost() is None
        now, stopped = 12.0, [7, 8]  # 7 ran in between
        said = liveness.lost()
        assert said is not None
        assert "8 for " in said
        stopped = []
        assert liveness.lost() is None

    def test_a_child_that_is_stopped_is_seen(self) -> None:

        pytest.importorskip("psutil")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            assert child.pid not in stopped_descendants()
            os.kill(child.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while child.pid not in stopped_descendants() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert child.pid in stopped_descendants()
        finally:
            child.kill()
            child.wait()


def test_arguments_have_the_names_of_the_version_that_reads_them() -> None:
    ours = {"cuda_graph_max_bs": 512, "tp_size": 2}
    assert in_this_versions_words(ours, {"cuda_graph_max_bs", "tp_size"}) == ours
    newer = {"cuda_graph_max_bs_decode", "tp_size"}
    expected = {"cuda_graph_max_bs_decode": 512, "tp_size": 2}
    assert in_this_versions_words(ours, newer) == expected
    # An argument that an old version lacks and does not need is dropped.
    assert in_this_versions_words({**ours, "retraction_policy": "priority"}, newer) == expected
    # An argument that no version has is passed on, so that SGLang refuses it by name.
    assert in_this_versions_words({"cuda_grap": 1}, newer) == {"cuda_grap": 1}


class TestGrpc:
    """The port that SGLang keeps for gRPC, beside the server's own."""

    @pytest.mark.parametrize("port", [55_536, 60_107, 65_535])
    def test_a_version_that_works_its_port_out_is_given_one_that_exists(self, port: int) -> None:
        environment: dict[str, str] = {}
        settle_grpc(environment, port, {"port"}, guarded=True)
        found = int(environment["SGLANG_GRPC_PORT"])
        assert 1 <= found <= 65_535
        assert found != port

    def test_what_fits_or_was_chosen_stays(self) -> None:
        environment: dict[str, str] = {}
        settle_grpc(environment, 55_535, {"port"}, guarded=True)
        assert environment == {}
        environment["SGLANG_GRPC_PORT"] = "40000"
        settle_grpc(environment, 60_000, {"port"}, guarded=True)
        assert environment == {"SGLANG_GRPC_PORT": "40000"}

    @pytest.mark.parametrize("guarded", [True, False])
    def test_a_version_that_would_listen_there_does_not_beside_a_token(self, guarded: bool) -> None:
        environment = {"SGLANG_GRPC_PORT": "40000"}
        settle_grpc(environment, 60_000, {"port", "grpc_port"}, guarded=guarded)
        assert environment == ({} if guarded else {"SGLANG_GRPC_PORT": "40000"})


class TestJoiningTheTrainersGroup:
    """How NCCL shares memory, which has to be the same in the server's processes and in the trainer."""

    def found(self, config, context, transport: str) -> str | None:
        there = context(transport=SimpleNamespace(name=transport))
        return variables(config(), there, "secret").get("NCCL_CUMEM_ENABLE")

    def test_it_is_nccls_own_choice_where_weights_come_by_nccl(
        self, config, context, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        assert self.found(config, context, "nccl") == "-2"
        assert self.found(config, context, "cuda_ipc") is None
        there = context(transport=SimpleNamespace(name="nccl"))
        said = command_by_hand(config(), there, port=30000)
        assert said.startswith("NCCL_CUMEM_ENABLE=-2 python -m dovetail_rollout_sglang.serve ")

    def test_what_the_user_has_set_stays(
        self, config, context, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
        assert self.found(config, context, "nccl") is None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("trainers", "servers"),
    [
        ("expandable_segments:True", ""),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        ("max_split_size_mb:64, expandable_segments:True", "max_split_size_mb:64"),
        ("max_split_size_mb:64", None),
    ],
)
def test_a_server_that_sleeps_takes_no_expandable_segments(
    config: Any, context: Any, monkeypatch: Any, name: str, trainers: str, servers: str | None
) -> None:
    monkeypatch.setenv(name, trainers)
    assert variables(config(offload=True), context(), "secret").get(name) == servers
    assert name not in variables(config(offload=False), context(), "secret")
