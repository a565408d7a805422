"""Beyond the conformance suite, on one real server: shared prompts, low-rank adapters, its end.

Without an accelerator SGLang's kernels for adapters are its plain PyTorch ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.rollout import Completion
from dovetail.interfaces.transport import WeightManifest
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.versions import installed
from dovetail_sdk.testing.conformance.rollout.interrupting import collected
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel, manifest_of
from dovetail_sdk.testing.replicas import send_weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.usefixtures("stand_ins"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(installed() is None, reason="SGLang is not installed here"),
]

TOLERANCE = 0.1 if torch.accelerator.is_available() else 1e-5
"""Nats; SGLang computes in bfloat16 on an accelerator, and the reference in float32 everywhere."""
EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def engine(started: Any, low_rank: Any) -> Iterator[SglangRollout]:
    """A server with room for an adapter, for all cases: each leaves it with weights that the next one replaces or knows."""
    engine = started(max_adapter_rank=low_rank.rank)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(tiny: Path) -> PlainModel:
    """The reference with the weights on disk."""
    return PlainModel.of(tiny)


def sent(engine: SglangRollout, manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
    transport = engine.context.transport
    assert transport is not None
    sender = transport.sender()
    try:
        send_weights(engine, sender, manifest, tensors.items())
    finally:
        sender.close()


def samples(engine: SglangRollout, low_rank: Any) -> list[Completion]:
    return cast("list[Completion]", asyncio.run(collected(engine, low_rank.request())))


def assert_drawn_from(completions: list[Completion], oracle: PlainModel, version: int) -> None:
    for completion in completions:
        assert set(completion.weight_versions.tolist()) == {version}
        expected_T = oracle.log_probs(range(5, 12), completion.response_ids)
        np.testing.assert_allclose(completion.log_probs, expected_T, atol=TOLERANCE, rtol=0)


def test_the_samples_of_a_group_share_their_prompts_cache(engine, low_rank) -> None:
    engine.figures()
    prompt = np.array([5 + n % 290 for n in range(600)])
    request = attrs.evolve(low_rank.request(n=8), prompt_ids=prompt)
    asyncio.run(collected(engine, request))
    figures = engine.figures()
    assert figures["rollout/sglang/prefix_cache_hits"].value > 0.99
    assert figures["rollout/sglang/new_tokens"].value == 64


@pytest.mark.parametrize(
    ("version", "modules", "rank_stabilised"),
    [
        (1, EVERYTHING, False),
        # Fused layers of which a part alone is adapted, whichever it is.
        (2, ("q_proj", "up_proj"), False),
        (3, ("k_proj", "gate_proj", "o_proj"), True),
        (4, ("v_proj", "down_proj"), False),
    ],
)
def test_an_adapter_is_used_as_if_it_were_merged(
    engine, plain, low_rank, version: int, modules: tuple[str, ...], rank_stabilised: bool
) -> None:
    manifest, tensors = low_rank.adapter(plain, version, modules, rank_stabilised=rank_stabilised)
    sent(engine, manifest, tensors)
    oracle = low_rank.merged(plain, manifest, tensors)
    drawn = samples(engine, low_rank)
    assert_drawn_from(drawn, oracle, version)
    without_T = plain.log_probs(range(5, 12), drawn[0].response_ids)
    assert drawn[0].log_probs is not None
    assert np.abs(without_T - drawn[0].log_probs).max() > 2 * TOLERANCE
    (scores,) = asyncio.run(engine.score([np.arange(5, 25)]))
    np.testing.assert_allclose(scores, oracle.score(np.arange(5, 25)), atol=TOLERANCE, rtol=0)


def test_whole_weights_take_an_adapters_place_and_another_adapter_lies_upon_them(
    engine, plain, low_rank
) -> None:
    changed = plain.changed()
    weights = changed.weights()
    sent(engine, manifest_of(10, weights), weights)
    assert_drawn_from(samples(engine, low_rank), changed, 10)
    manifest, tensors = low_rank.adapter(plain, 11, ("q_proj", "down_proj"))
    sent(engine, manifest, tensors)
    oracle = low_rank.merged(changed, manifest, tensors)
    assert_drawn_from(samples(engine, low_rank), oracle, 11)
    weights = plain.weights()
    sent(engine, manifest_of(12, weights), weights)
    assert_drawn_from(samples(engine, low_rank), plain, 12)


def test_an_adapter_that_is_not_taken_leaves_the_one_before_in_force(
    engine, plain, low_rank
) -> None:
    manifest, tensors = low_rank.adapter(plain, 20, EVERYTHING)
    sent(engine, manifest, tensors)
    oracle = low_rank.merged(plain, manifest, tensors)
    broken, values = low_rank.adapter(plain, 21, EVERYTHING)
    names = {name: name.replace("down_proj", "side_proj") for name in values}
    values = {names[name]: value for name, value in values.items()}
    specs = tuple(attrs.evolve(spec, name=names[spec.name]) for spec in broken.tensors)
    with pytest.raises(WeightSyncError, match=r"no room for the adapter's '.*side_proj"):
        sent(engine, attrs.evolve(broken, tensors=specs), values)
    assert_drawn_from(samples(engine, low_rank), oracle, 20)
    manifest, tensors = low_rank.adapter(plain, 21, EVERYTHING)
    sent(engine, manifest, tensors)
    assert_drawn_from(samples(engine, low_rank), low_rank.merged(plain, manifest, tensors), 21)


def test_an_adapter_beyond_its_room_is_refused_and_nothing_changes(engine, plain, low_rank) -> None:
    manifest, _ = low_rank.adapter(plain, 30, EVERYTHING)
    large = attrs.evolve(manifest, adapter=attrs.evolve(manifest.adapter, rank=low_rank.rank + 1))
    with pytest.raises(WeightSyncError, match=r"room for rank 4.*\n.*max_adapter_rank=5"):
        engine.receive_weights(30, large)
    assert samples(engine, low_rank)[0].weight_versions[0] == engine.version < 30


def test_the_end_of_a_server_is_not_taken_for_a_crash(engine) -> None:
    log = engine.backend._own.log
    engine.close()
    assert "crashed" not in log.read_text()
