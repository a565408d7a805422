"""Weights sent to SGLang's processes from another accelerator, also after a sleep.

Without accelerators, gloo replaces NCCL between the same processes; the transport by a directory is tested in both cases.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_rollouts.transports.config import DiskTransportConfig
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.replicas import send_weights
from dovetail_sdk.testing.transport_ends import manifest_of
from dovetail_transports.config import CudaIpcConfig, NcclConfig

THERE = torch.accelerator.is_available()
ACCELERATORS = torch.accelerator.device_count() if THERE else 0
TOLERANCE = 0.1 if THERE else 1e-5
"""Maximum mean difference in nats a token; on an accelerator SGLang computes in bfloat16, the reference always in float32."""
EVERYTHING = frozenset({"weights", "kv_cache"})
TWO = (
    pytest.mark.gpu,
    pytest.mark.skipif(ACCELERATORS < 2, reason="needs two GPUs"),
)
PATIENCE = 120.0

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.usefixtures("stand_ins"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(SGLANG.installed() is None, reason="SGLang is not installed here"),
]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> PlainModel:
    """The reference with the weights on disk."""
    return PlainModel.of(tiny)


def far_from(oracle: PlainModel, engine: SglangRollout) -> float:
    """How differently engine and reference find the same tokens likely: the mean, in nats."""
    ids = np.arange(5, 69)
    (scores,) = asyncio.run(engine.score([ids]))
    return float(np.abs(scores - oracle.score(ids)).mean())


def assert_updates_arrive(engine: SglangRollout, plain: PlainModel, where: str) -> None:
    """Two updates from a device, the second to an engine that slept without its weights."""
    transport = engine.context.transport
    assert transport is not None
    other = plain.changed()
    sender = transport.sender()
    try:
        weights = other.weights(where)
        # Small buckets, so that many pass through the ring buffer.
        manifest = manifest_of(weights, 1, bucket_bytes=1 << 16)
        send_weights(engine, sender, manifest, weights.items())
        assert far_from(other, engine) < TOLERANCE < far_from(plain, engine)
        freed = engine.sleep(EVERYTHING, keep_weights=False)
        assert freed > 1 << 30 or not THERE
        engine.wake(frozenset({"weights"}))
        weights = plain.weights(where)
        send_weights(engine, sender, manifest_of(weights, 2), weights.items())
        engine.wake(frozenset({"kv_cache"}))
        assert far_from(plain, engine) < TOLERANCE < far_from(other, engine)
    finally:
        sender.close()


@pytest.mark.parametrize(
    "carrier",
    [
        pytest.param(NcclConfig(name="nccl", timeout=PATIENCE), id="nccl", marks=TWO),
        pytest.param(CudaIpcConfig(name="cuda_ipc", timeout=PATIENCE), id="cuda_ipc", marks=TWO),
        pytest.param(
            NcclConfig(name="nccl", backend="gloo", timeout=PATIENCE),
            id="gloo",
            marks=(pytest.mark.nightly, pytest.mark.skipif(THERE, reason="NCCL carries them")),
        ),
        pytest.param(
            DiskTransportConfig(name="disk"),
            id="disk",
            marks=(
                pytest.mark.nightly,
                pytest.mark.skipif(ACCELERATORS == 1, reason="needs two GPUs, or none"),
            ),
        ),
    ],
)
def test_weights_come_from_another_accelerator(started: Any, plain: PlainModel, carrier) -> None:
    device = "cuda:1" if THERE else "cpu"
    engine = started(carrier=carrier, device=device, offload=True)
    try:
        assert_updates_arrive(engine, plain, "cuda:0" if THERE else "cpu")
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(ACCELERATORS < 2, reason="needs two GPUs")
def test_two_ranks_take_weights_as_one(started: Any, plain: PlainModel) -> None:
    carrier = CudaIpcConfig(name="cuda_ipc", timeout=PATIENCE)
    engine = started(carrier=carrier, device="cuda:0", offload=True, tensor_parallel_size=2)
    try:
        assert engine.receivers == 2
        assert_updates_arrive(engine, plain, "cuda:0")
    finally:
        engine.close()
