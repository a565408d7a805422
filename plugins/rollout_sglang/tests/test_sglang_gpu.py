"""Tests that need an accelerator: a seed for each sample, which SGLang uses only in deterministic inference."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.random_streams import SampleStream
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_sdk.testing.conformance.rollout.interrupting import collected

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(SGLANG.installed() is None, reason="SGLang is not installed here"),
]


def test_a_sample_with_a_seed_is_the_same_alone_and_in_company(started: Any, asking: Any) -> None:
    engine = started(seeding="per_sample")
    try:
        together = asyncio.run(collected(engine, asking(n=64, max_new_tokens=64)))
        by_number = {completion.sample: completion for completion in together}
        for number in (0, 17, 63):
            alone = attrs.evolve(
                asking(n=1, max_new_tokens=64),
                streams=(SampleStream(seed=1, sample=number),),
            )
            (again,) = asyncio.run(collected(engine, alone))
            np.testing.assert_array_equal(again.response_ids, by_number[number].response_ids)
        texts = {tuple(completion.response_ids.tolist()) for completion in together}
        assert len(texts) > 60
    finally:
        engine.close()
