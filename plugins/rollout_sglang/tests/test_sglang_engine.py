"""Tests beyond the conformance suite on one real server: shared prompts, low-rank adapters, and the server's end.

Without an accelerator, SGLang computes adapters by plain PyTorch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from dovetail.errors import WeightSyncError
from dovetail.interfaces import BaseRollout
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_sdk.testing.conformance.rollout.adapters import EVERY_LAYER, AdapterCases
from dovetail_sdk.testing.conformance.rollout.interrupting import collected, order_of_waiting
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.sglang,
    pytest.mark.usefixtures("stand_ins"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(SGLANG.installed() is None, reason="SGLang is not installed here"),
]

RANK = 4


@pytest.fixture(scope="module")
def server(started: Any) -> Iterator[SglangRollout]:
    """A server with room for an adapter, for all cases."""
    engine = started(max_adapter_rank=RANK, max_num_seqs=8)
    yield engine
    engine.close()


def test_the_samples_of_a_group_share_their_prompts_cache(server, asking) -> None:
    server.metrics()
    prompt = np.array([5 + n % 290 for n in range(600)])
    request = attrs.evolve(asking(n=8), prompt_ids=prompt)
    asyncio.run(collected(server, request))
    figures = server.metrics()
    assert figures["rollout/sglang/prefix_cache_hits"].value > 0.99
    assert figures["rollout/sglang/new_tokens"].value == 64


def test_of_waiting_requests_those_of_the_lowest_priority_begin_first(server, asking) -> None:
    assert order_of_waiting(server, asking(n=1)) == [1, 2, 8, 9]


class TestAdapters(AdapterCases):
    """The suite's cases of adapters, on the server of all cases here."""

    plugin = SglangRollout
    config: ClassVar[Any] = SglangRolloutConfig(name="sglang", max_adapter_rank=RANK)
    # On an accelerator SGLang computes in bfloat16, the reference always in float32.
    tolerance = 0.1 if torch.accelerator.is_available() else 1e-5
    dtype = "bfloat16" if torch.accelerator.is_available() else "float32"

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tiny: Path) -> Path:
        return tiny

    @pytest.fixture(scope="class")
    @classmethod
    def updated_engine(cls, server: SglangRollout) -> Iterator[BaseRollout]:
        yield server
        cls().sender(server).close()

    def test_what_its_layers_have_no_room_for_is_named(
        self, fresh: BaseRollout, plain: PlainModel
    ) -> None:
        adapter = self.adapter(plain, EVERY_LAYER).renamed("down_proj", "side_proj")
        with pytest.raises(WeightSyncError, match=r"adapters of the layer '.*side_proj"):
            self.adapt(fresh, adapter)


def test_the_end_of_a_server_is_not_taken_for_a_crash(server) -> None:
    log = server.backend._own.log
    server.close()
    assert "crashed" not in log.read_text()
