"""Tests that need accelerators: weights through their memory, adapters, sleep, random initial weights, fp8, several GPUs.

Models compute in bfloat16; the reference is a plain forward pass in float32 on the CPU, and differences are means in nats a token.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import BaseRollout, PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail.sections import ModelSection
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollout_vllm.versions import VLLM
from dovetail_sdk.testing.conformance import RolloutConformance
from dovetail_sdk.testing.conformance.rollout.interrupting import begun, collected
from dovetail_sdk.testing.conformance.rollout.low_rank import PlainAdapter
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_sdk.testing.transport_ends import manifest_of
from dovetail_transports.config import CudaIpcConfig, NcclConfig

GPUS = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here"),
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU"),
]

EVERYTHING, WEIGHTS, CACHE = (
    frozenset({"weights", "kv_cache"}),
    frozenset({"weights"}),
    frozenset({"kv_cache"}),
)
ROUNDING = 0.03
"""Maximum mean difference by bfloat16; other weights of these models differ ten times as much."""
QUANTISING = 0.12
"""Maximum mean difference by fp8."""
TRAINER = "cuda:0"
IPC = CudaIpcConfig(name="cuda_ipc", timeout=30.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, and widths that every quantised kernel has."""
    directory = tmp_path_factory.mktemp("gpu") / "tiny"
    return tiny_model_and_tokenizer(directory, vocab_size=320, hidden_size=256)


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainModel:
    return PlainModel.of(model)


@pytest.fixture(scope="module")
def other(plain: PlainModel) -> PlainModel:
    """Every matrix moved by its own spread."""
    found, generator = copy.deepcopy(plain._model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in found.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * max(float(weight.std()), 0.02))
    return PlainModel(found)


def start(
    directory: Path, *, device: str = TRAINER, transport: Any = IPC, **settings: Any
) -> VllmRollout:
    """An engine whose weights come from this process's first GPU."""
    follow = settings.pop("weights_follow", False)
    config = VllmRolloutConfig(
        name="vllm",
        **{
            "enforce_eager": True,
            "max_model_len": 2048,
            "gpu_memory_utilization": 0.1,
            **settings,
        },
    )
    run = Path(tempfile.mkdtemp(prefix="run-", dir=directory.parent))
    made = PluginContext(seed=1, role="rollout", run_directory=run, device=TRAINER)
    ref = PluginRef(kind="weight_transport", name=transport.name, config=transport)
    engine = VllmRollout(
        config,
        attrs.evolve(
            made,
            device=device,
            model=ModelSection(path=str(directory), dtype="bfloat16"),
            transport=make_plugin(ref, made),
            weights_follow=follow,
        ),
    )
    engine.start()
    return engine


def send_model(acts: Any, engine: VllmRollout, version: int, oracle: PlainModel) -> None:
    weights = {n: w.bfloat16() for n, w in oracle.weights(TRAINER).items()}
    acts.send(engine, manifest_of(weights, version), weights)


def far_from(oracle: PlainModel, engine: VllmRollout) -> float:
    """Mean difference of what an engine and a model find likely."""
    generator = np.random.default_rng(7)
    sequences = [generator.integers(5, 300, 64) for _ in range(8)]
    found = asyncio.run(engine.score(sequences))
    return float(
        np.mean([np.abs(f - oracle.score(s)) for f, s in zip(found, sequences, strict=True)])
    )


class TestAdapters:
    """One engine with room for an adapter that can sleep."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model: Path) -> Iterator[VllmRollout]:
        engine = start(model, max_adapter_rank=4, offload=True)
        yield engine
        engine.close()

    def test_an_adapter_is_used_as_if_it_were_merged(self, acts, engine, plain) -> None:
        for version in (1, 2):
            adapter = PlainAdapter.random(plain, version, ("q_proj", "down_proj"))
            tensors = {name: tensor.to(TRAINER) for name, tensor in adapter.tensors.items()}
            acts.send(engine, adapter.manifest, tensors)
            assert far_from(adapter.merged(plain), engine) < ROUNDING
            assert far_from(plain, engine) > 3 * ROUNDING

    def test_what_an_adapter_lies_upon_and_the_adapter_outlast_sleep(self, acts, engine) -> None:
        long = acts.request(n=1, max_new_tokens=32, temperature=0.0)
        (before,) = asyncio.run(collected(engine, long))
        assert engine.sleep(EVERYTHING, keep_weights=False) > 1 << 30
        engine.wake(EVERYTHING)
        (after,) = asyncio.run(collected(engine, long))
        np.testing.assert_array_equal(after.response_ids, before.response_ids)
        np.testing.assert_array_equal(after.log_probs, before.log_probs)

    def test_whole_weights_take_an_adapters_place(self, acts, engine, other) -> None:
        send_model(acts, engine, 3, other)
        assert far_from(other, engine) < ROUNDING


class TestWeights:
    """One engine that starts on random weights and can sleep."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model: Path) -> Iterator[VllmRollout]:
        engine = start(model, weights_follow=True, offload=True)
        yield engine
        engine.close()

    def test_it_starts_on_random_weights_and_serves_none_of_them(self, acts, engine, plain) -> None:
        with pytest.raises(RolloutError, match="received no weights yet"):
            asyncio.run(collected(engine, acts.request()))
        send_model(acts, engine, 1, plain)
        assert far_from(plain, engine) < ROUNDING

    def test_an_update_without_a_part_of_a_fused_layer_changes_nothing(
        self, acts, engine, plain, other
    ) -> None:
        weights = {n: w.bfloat16() for n, w in other.weights(TRAINER).items()}
        gone = next(n for n in weights if n.endswith("k_proj.weight"))
        del weights[gone]
        with pytest.raises(WeightSyncError, match=gone.replace(".", r"\.")):
            engine.receive_weights(2, manifest_of(weights, 2))
        assert engine.version == 1
        assert far_from(plain, engine) < ROUNDING

    def test_samples_that_run_go_on_under_weights_that_come(self, acts, engine, other) -> None:
        async def scenario() -> list[Any]:
            long = acts.request(n=4, max_new_tokens=1800)
            running = asyncio.create_task(collected(engine, long))
            await begun(engine, long)
            await asyncio.to_thread(send_model, acts, engine, 3, other)
            return await running

        for completion in asyncio.run(scenario()):
            assert len(completion.response_ids) == 1800
            assert list(dict.fromkeys(completion.weight_versions.tolist())) == [1, 3]
            after = completion.weight_versions == 3
            expected_T = other.log_probs(acts.prompt, completion.response_ids)
            assert np.abs(completion.log_probs - expected_T)[after].mean() < ROUNDING

    def test_it_sleeps_again_while_its_cache_still_does(self, acts, engine, plain) -> None:
        """As where an update failed elsewhere, and all are sent it anew."""
        free = lambda: torch.get_device_module().mem_get_info(0)[0]  # noqa: E731
        awake = free()
        assert engine.sleep(EVERYTHING, keep_weights=False) > 1 << 30
        asleep = free()
        for version in (4, 5):
            engine.wake(WEIGHTS)
            send_model(acts, engine, version, plain)
            assert free() - awake > 1 << 30, "the cache has to sleep on"
            if version == 4:
                engine.sleep(EVERYTHING, keep_weights=False)
        engine.wake(CACHE)
        assert asleep - free() > 1 << 30
        assert far_from(plain, engine) < ROUNDING
        assert asyncio.run(collected(engine, acts.request(n=1)))[0].weight_versions[0] == 5


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"quantization": "fp8", "kv_cache_dtype": "fp8"}, id="weights_and_cache"),
        pytest.param({"kv_cache_dtype": "fp8"}, id="cache"),
    ],
)
def test_fp8_generates_and_takes_weights_within_its_rounding(
    acts, model: Path, plain: PlainModel, other: PlainModel, settings: dict[str, str]
) -> None:
    engine = start(model, **settings)
    try:
        assert far_from(plain, engine) < QUANTISING
        for version, oracle in ((1, other), (2, plain), (3, other)):
            send_model(acts, engine, version, oracle)
            assert far_from(oracle, engine) < QUANTISING
        assert far_from(plain, engine) > 2 * QUANTISING
        for completion in asyncio.run(collected(engine, acts.request(max_new_tokens=64))):
            assert set(completion.weight_versions.tolist()) == {3}
            expected_T = other.log_probs(acts.prompt, completion.response_ids)
            assert np.abs(completion.log_probs - expected_T).mean() < QUANTISING
    finally:
        engine.close()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
class TestTwoGpus:
    def test_two_workers_generate_sleep_and_take_weights_as_one(
        self, acts, model: Path, plain: PlainModel, other: PlainModel
    ) -> None:
        engine = start(model, tensor_parallel_size=2, offload=True)
        try:
            assert engine.receivers == 2
            assert far_from(plain, engine) < ROUNDING
            send_model(acts, engine, 1, other)
            assert far_from(other, engine) < ROUNDING
            before = [torch.get_device_module().mem_get_info(i)[0] for i in range(2)]
            engine.sleep(EVERYTHING, keep_weights=False)
            for index in range(2):
                freed = torch.get_device_module().mem_get_info(index)[0] - before[index]
                assert freed > 1 << 30
            engine.wake(WEIGHTS)
            send_model(acts, engine, 2, plain)
            engine.wake(CACHE)
            assert far_from(plain, engine) < ROUNDING
        finally:
            engine.close()

    def test_weights_come_over_nccl_from_another_gpu(
        self, acts, model: Path, plain: PlainModel, other: PlainModel
    ) -> None:
        engine = start(
            model, device="cuda:1", transport=NcclConfig(name="nccl", timeout=60.0), offload=True
        )
        try:
            for version, oracle in ((1, other), (2, plain)):
                send_model(acts, engine, version, oracle)
                assert far_from(oracle, engine) < ROUNDING
        finally:
            engine.close()


class TestServer(RolloutConformance):
    """The conformance suite on an HTTP server with CUDA graphs, weights by `cuda_ipc`."""

    plugin = VllmRollout
    device = "cuda"
    weights_device = TRAINER
    # An accelerator may add up a float32 matrix product in another order than a CPU.
    tolerance = 1e-3
    config = VllmRolloutConfig(
        name="vllm", mode="server", max_model_len=4096, gpu_memory_utilization=0.1, offload=True
    )

    def transport(self, run_directory: Path) -> Any:
        place = PluginContext(run_directory=run_directory, device=TRAINER)
        config = attrs.evolve(IPC, timeout=10.0)
        return make_plugin(
            PluginRef(kind="weight_transport", name="cuda_ipc", config=config), place
        )

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        """The engine that is updated serves all cases: starting one takes longer than all of them."""
        return fresh
