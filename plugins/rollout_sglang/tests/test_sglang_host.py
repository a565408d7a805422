"""What a server does around SGLang: shared prompts, processes that stand still, arguments by their names; none of it needs SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from dovetail_rollout_sglang.liveness import Liveness, stopped_descendants
from dovetail_rollout_sglang.prefixes import Prefixes
from dovetail_rollout_sglang.versions import in_this_versions_words

LONG, SHORT = list(range(100)), [1, 2, 3]


class TestPrefixes:
    def order(self, prompts: Sequence[list[int]]) -> list[str]:
        """What happens in which order when a sample of each prompt comes, all together."""
        said: list[str] = []

        async def compute(prompt: Sequence[int]) -> None:
            said.append(f"{len(prompt)} begins")
            await asyncio.sleep(0.01)
            said.append(f"{len(prompt)} computed")

        async def sample(prefixes: Prefixes, prompt: list[int]) -> None:
            await prefixes.shared(prompt)
            said.append(f"{len(prompt)} sampled")

        async def together() -> None:
            prefixes = Prefixes(compute)
            for _ in range(2):  # what was kept of the first time must not do for the second
                await asyncio.gather(*(sample(prefixes, prompt) for prompt in prompts))

        asyncio.run(together())
        half = len(said) // 2
        assert said[:half] == said[half:]
        return said[:half]

    def test_samples_of_a_prompt_wait_until_it_has_been_computed_once(self) -> None:
        assert self.order([LONG] * 3) == ["100 begins", "100 computed", *["100 sampled"] * 3]

    def test_a_sample_alone_waits_for_nothing_and_so_do_short_prompts(self) -> None:
        assert self.order([LONG]) == ["100 sampled"]
        # An equal prompt of another request is another.
        assert self.order([LONG, list(LONG)]) == ["100 sampled"] * 2
        assert self.order([SHORT] * 3) == ["3 sampled"] * 3


class TestLiveness:
    def test_who_stands_still_for_too_long_is_lost_and_who_goes_on_is_not(self) -> None:
        now, stopped = 0.0, [7, 8]
        liveness = Liveness(lambda: stopped, patience=10.0, clock=lambda: now)
        assert liveness.lost() is None
        now, stopped = 6.0, [8]
        assert liveness.lost() is None
        now, stopped = 12.0, [7, 8]  # 7 has gone on in between
        said = liveness.lost()
        assert said is not None
        assert "8 have been stopped" in said
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
    # What neither has stays as it is, to be refused by its name.
    assert in_this_versions_words({"cuda_grap": 1}, newer) == {"cuda_grap": 1}
