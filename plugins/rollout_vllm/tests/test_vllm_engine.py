"""Tests beyond the conformance suite on one real engine: shared prompts, updates, logs, and the death of the engine's process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx2
import numpy as np
import psutil
import pytest

from dovetail.errors import ConfigError, RolloutError, WeightSyncError
from dovetail.interfaces import FinishReason, PluginContext
from dovetail.sections import ModelSection
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollout_vllm.versions import VLLM
from dovetail_sdk.testing.conformance.rollout.interrupting import begun, collected, order_of_waiting
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.transport_ends import manifest_of
from dovetail_serving import free_port
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here"),
]


def start(
    directory: Path, run: Path, overrides: Mapping[str, Any] | None = None, **settings: Any
) -> VllmRollout:
    config = VllmRolloutConfig(
        name="vllm", enforce_eager=True, **{"max_model_len": 2048, **settings}
    )
    made = PluginContext(seed=1, role="rollout", run_directory=run)
    transport = SharedMemoryTransport(SharedMemoryConfig(name="shared_memory", timeout=60.0), made)
    model = ModelSection(path=str(directory), dtype="float32", override_config=overrides or {})
    engine = VllmRollout(config, attrs.evolve(made, model=model, transport=transport))
    engine.start()
    return engine


class TestEngine:
    """In this order: the last test kills the engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("run")

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny: Path, run: Path) -> Iterator[VllmRollout]:
        # A KV cache of 5,120 tokens: if more run, vLLM preempts some requests and computes them again.
        settings = {"num_gpu_blocks_override": 40}
        engine = start(tiny, run, metrics_port=free_port(), max_num_seqs=8, engine_args=settings)
        yield engine
        engine.close()

    def test_its_processes_print_into_the_run_directory(self, engine, run: Path) -> None:
        printed = (run / "logs" / "rollout-0.vllm.log").read_text()
        assert "EngineCore" in printed or "engine" in printed

    def test_the_samples_of_a_group_share_their_prompts_cache(self, acts, engine) -> None:
        engine.metrics()
        asyncio.run(collected(engine, acts.request(prompt=[5 + n % 290 for n in range(600)], n=8)))
        figures = engine.metrics()
        # 600 prompt tokens fill 4 blocks of 128, which all samples but the first find in the cache.
        assert figures["rollout/vllm/prefix_cache_hits"].value > 0.5
        assert figures["rollout/vllm/new_tokens"].value == 64
        assert figures["rollout/vllm/running_requests_max"].value == 8

    def test_log_probs_are_the_models_where_requests_are_taken_back_and_prompts_computed_in_parts(
        self, acts, engine, tiny: Path
    ) -> None:
        engine.metrics()
        lengths = (900, 650, 400, 1100, 5, 300, 777, 513)
        prompts = [
            [5 + (n * k) % 290 for n in range(1, length)] for k, length in enumerate(lengths, 1)
        ]

        async def scenario() -> list[Any]:
            requests = [
                acts.request(f"r{k}", n=1, prompt=prompt, max_new_tokens=200 + 30 * k)
                for k, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*(collected(engine, request) for request in requests))

        plain = PlainModel.of(tiny)
        for prompt, (completion,) in zip(prompts, asyncio.run(scenario()), strict=True):
            expected_T = plain.log_probs(prompt, completion.response_ids)
            np.testing.assert_allclose(completion.log_probs, expected_T, atol=1e-4, rtol=0)
        assert engine.metrics()["rollout/vllm/preemptions"].value > 0

    def test_of_waiting_requests_those_of_the_lowest_priority_begin_first(
        self, acts, engine
    ) -> None:
        assert order_of_waiting(engine, acts.request(n=1)) == [1, 2, 8, 9]

    def test_vllms_own_metrics_are_served_on_the_loopback_interface(self, acts, engine) -> None:
        def counted() -> float:
            answer = httpx2.get(f"http://127.0.0.1:{engine.config.metrics_port}/metrics")
            found = re.search(
                r"^vllm:generation_tokens_total{.*} (\S+)$", answer.text, re.MULTILINE
            )
            assert found is not None
            return float(found[1])

        before = counted()
        asyncio.run(collected(engine, acts.request(n=3)))
        assert counted() - before == 24
        # On other addresses the port is still free.
        with socket.socket() as other:
            other.bind(("127.0.0.2", engine.config.metrics_port))

    def test_an_update_without_a_part_of_a_fused_layer_is_refused_before_anything_is_sent(
        self, engine, tiny: Path
    ) -> None:
        weights = PlainModel.of(tiny).weights()
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(WeightSyncError, match=r"not 'model\.layers\.1\.self_attn\.k_proj"):
            engine.receive_weights(5, manifest_of(weights, 5))
        assert engine.version == 0

    def test_an_update_smaller_than_the_last_one_is_refused(self, acts, engine, tiny: Path) -> None:
        weights = PlainModel.of(tiny).changed().weights()
        acts.send(engine, manifest_of(weights, 5), weights)
        del weights["model.norm.weight"]
        with pytest.raises(WeightSyncError, match=r"lacks model\.norm\.weight"):
            engine.check_manifest(6, manifest_of(weights, 6))

    def test_stop_strings_end_responses(self, acts, engine) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(engine.context.model.path)
        letters = tuple("abcdefghijklmnopqrstuvwxyz")
        for completion in asyncio.run(
            collected(engine, acts.request(n=8, max_new_tokens=500, stop=letters))
        ):
            assert completion.finish_reason == FinishReason.STOP
            before = tokenizer.decode(completion.response_ids[:-1])
            assert not any(letter in before for letter in letters)
            assert any(letter in tokenizer.decode(completion.response_ids) for letter in letters)
            assert len(completion.log_probs) == len(completion.response_ids)

    def test_weights_that_come_while_samples_run_interrupt_them(
        self, acts, engine, tiny: Path
    ) -> None:
        plain = PlainModel.of(tiny)
        weights = plain.weights()

        async def scenario() -> list[Any]:
            long = acts.request(n=2, max_new_tokens=1500)
            running = asyncio.create_task(collected(engine, long))
            await begun(engine, long)
            await asyncio.to_thread(acts.send, engine, manifest_of(weights, 7), weights)
            return await running

        for completion in asyncio.run(scenario()):
            assert len(completion.response_ids) == 1500
            assert list(dict.fromkeys(completion.weight_versions.tolist())) == [5, 7]
            after = completion.weight_versions == 7
            expected_T = plain.log_probs(range(5, 12), completion.response_ids)
            np.testing.assert_allclose(
                completion.log_probs[after], expected_T[after], atol=1e-5, rtol=0
            )

    def test_when_its_process_dies_all_that_runs_fails_and_all_that_follows(
        self, acts, engine, tiny: Path
    ) -> None:
        async def scenario() -> list[Any]:
            long = acts.request(n=3, max_new_tokens=2000)
            running = asyncio.create_task(collected(engine, long))
            await begun(engine, long)
            for child in psutil.Process().children():
                if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
            return await asyncio.gather(running, return_exceptions=True)

        (error,) = asyncio.run(asyncio.wait_for(scenario(), 600))
        assert isinstance(error, RolloutError)
        assert "vLLM has died" in error.message
        assert not engine.alive()
        with pytest.raises(RolloutError, match="vLLM has died"):
            asyncio.run(collected(engine, acts.request()))
        with pytest.raises(WeightSyncError, match="broke off"):
            engine.receive_weights(9, manifest_of(PlainModel.of(tiny).weights(), 9))
        engine.close()
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"http://127.0.0.1:{engine.config.metrics_port}/metrics")


class TestRefusals:
    def test_more_positions_than_the_model_has(self, tiny: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"max_model_len=5000 is.*model's 4096"):
            start(tiny, tmp_path, max_model_len=5000)

    def test_an_engine_argument_that_vllm_does_not_have(self, tiny: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"'max_num_seq'(?s:.)*'max_num_seqs'"):
            start(tiny, tmp_path, engine_args={"max_num_seq": 3})


@pytest.mark.nightly
class TestTensorParallel:
    def test_two_workers_generate_and_take_weights_as_one(
        self, acts, tiny: Path, tmp_path: Path
    ) -> None:
        engine = start(tiny, tmp_path, tensor_parallel_size=2)
        try:
            changed = PlainModel.of(tiny).changed()
            weights = changed.weights()
            acts.send(engine, manifest_of(weights, 1), weights)
            for completion in asyncio.run(collected(engine, acts.request())):
                expected_T = changed.log_probs(range(5, 12), completion.response_ids)
                np.testing.assert_allclose(completion.log_probs, expected_T, atol=1e-5, rtol=0)
        finally:
            engine.close()


def test_overrides_of_the_models_config_are_those_of_transformers(
    tiny: Path, tmp_path: Path
) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(tiny, edited)
    values = json.loads((tiny / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] = 37.0
    (edited / "config.json").write_text(json.dumps(values))
    overrides = {"rope_theta": 37.0, "max_position_embeddings": 8192}
    engine = start(tiny, tmp_path / "run", overrides=overrides, max_model_len=None)
    try:
        sequence = np.arange(200) % 290 + 5
        [found] = asyncio.run(engine.score([sequence]))
        np.testing.assert_allclose(found, PlainModel.of(edited).score(sequence), atol=1e-4)
        assert np.abs(found - PlainModel.of(tiny).score(sequence)).max() > 0.01
        assert engine._facts.max_positions == 8192
    finally:
        engine.close()
