"""Arguments, refusals and error messages; vLLM is not needed."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.errors import ConfigError, ModelError, PlacementError
from dovetail.interfaces import (
    AdapterSpec,
    RolloutRequest,
    SamplingParams,
    TensorSpec,
    WeightManifest,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_datasets import ModelFacts, read_shape
from dovetail_rollout_vllm.adapters import room_for
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_args import (
    CACHE_SLACK,
    WORKING_SHARE,
    cache_bytes,
    engine_arguments,
    own_arguments,
)
from dovetail_rollout_vllm.environment import variables
from dovetail_rollout_vllm.failures import FAILURES
from dovetail_rollout_vllm.versions import RUNNER_VARIABLE
from dovetail_serving import DrivenEngine, manifest_from, manifest_info, releases
from dovetail_serving.requests import problem_of, sample_seed, with_ends

FACTS = ModelFacts(vocab_size=300, max_positions=64, eos_token_ids=(2, 9))


def request(prompt=(5, 6, 7), **sampling) -> RolloutRequest:
    return RolloutRequest(
        request_id="r",
        prompt_ids=np.array(prompt, dtype=np.int64),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
        streams=(SampleStream(seed=1),),
    )


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch):
    """Pretends that these distributions are all that is installed."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


class TestVersions:
    def test_requests_are_kept_over_an_update_by_versions_that_label_tokens(
        self, release, config
    ) -> None:
        release(vllm="0.31.1")
        for mode in ("engine", "server"):
            assert "from vLLM 0.32 on (installed: 0.31.1)" in config(mode=mode).cache_problem()
        # A server's version is known only when it is joined.
        assert config(mode="server", urls=("http://127.0.0.1:8000",)).cache_problem() is None
        release(vllm="0.32.0")
        assert config(mode="server").cache_problem() is None


class TestArguments:
    def test_ours_hold_over_the_users_and_one_warning_says_so(
        self, config, context, caplog
    ) -> None:
        theirs = {"seed": 3, "logprobs_mode": "raw_logits", "max_num_seqs": 17}
        with caplog.at_level(logging.WARNING):
            found = engine_arguments(config(engine_args=theirs), context())
        assert found["max_num_seqs"] == 17
        assert found["logprobs_mode"] == "processed_logprobs"
        (record,) = caplog.records
        said = record.getMessage()
        assert "logprobs_mode='raw_logits' (Dovetail sets 'processed_logprobs')" in said
        assert "seed=3" in said
        assert "max_num_seqs" not in said

    def test_expert_parallelism_is_passed_through(self, config, context) -> None:
        settings = {
            "tensor_parallel_size": 2,
            "engine_args": {
                "enable_expert_parallel": True,
                "all2all_backend": "allgather_reducescatter",
            },
        }
        found = engine_arguments(config(**settings), context())
        assert found["enable_expert_parallel"] is True
        assert found["all2all_backend"] == "allgather_reducescatter"
        assert found["tensor_parallel_size"] == 2
        assert found["distributed_executor_backend"] == "mp"

    def test_engines_beside_each_other_are_replicas(self, config, context) -> None:
        with pytest.raises(ConfigError, match=r"data_parallel_size=4.*\n.*rollout\.replicas=4"):
            engine_arguments(config(engine_args={"data_parallel_size": 4}), context())

    def test_adapters_in_float32_are_refused_on_accelerators(
        self, config, context, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert engine_arguments(config(max_adapter_rank=8), context())["max_lora_rank"] == 8
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        with pytest.raises(ConfigError, match=r"float32(?s:.)*model\.dtype=bfloat16"):
            engine_arguments(config(max_adapter_rank=8), context())

    def test_the_cache_is_as_large_as_samples_fill_where_that_is_less_than_the_share(
        self, config, context
    ) -> None:
        shape = read_shape(context().model)
        each = 4 * shape.cached_per_token
        weights = 4 * shape.parameters
        known = attrs.evolve(context(), cache_tokens=100_000)
        needed = round(100_000 * CACHE_SLACK) * each
        most = (weights + needed) / (1 - WORKING_SHARE) * 2
        assert cache_bytes(config(), known, round(most) + 10) == needed
        assert cache_bytes(config(), known, round(most) - 10) is None
        assert cache_bytes(config(), context(), 2**40) is None
        assert cache_bytes(config(kv_cache_dtype="fp8"), known, 2**40) == needed // 4
        few = attrs.evolve(known, cache_tokens=10)
        longest = round(200 * CACHE_SLACK) * each
        assert cache_bytes(config(max_model_len=200), few, 2**40) == longest
        halves = config(tensor_parallel_size=2)
        assert cache_bytes(halves, known, 2**40) == needed // min(2, shape.kv_heads)

    def test_the_cache_has_the_users_size(self, config, context, monkeypatch) -> None:
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("dovetail_rollout_vllm.engine_args.accelerator_bytes", lambda: 2**40)
        known = attrs.evolve(context(), cache_tokens=1000)
        assert own_arguments(config(), known)["kv_cache_memory_bytes"] > 0
        assert "kv_cache_memory_bytes" not in own_arguments(config(), context())
        sized = config(engine_args={"kv_cache_memory_bytes": 99})
        assert engine_arguments(sized, known)["kv_cache_memory_bytes"] == 99

    def test_replicas_draw_differently(self, config, context) -> None:
        seeds = {own_arguments(config(), context(rank=rank))["seed"] for rank in range(8)}
        assert len(seeds) == 8

    def test_weights_on_disk_stay_unread_only_where_whole_ones_follow(
        self, config, context
    ) -> None:
        first = attrs.evolve(context(), weights_follow=True)
        assert own_arguments(config(), first)["load_format"] == "dummy"
        assert "load_format" not in own_arguments(config(), context())
        for kept in (
            config(max_adapter_rank=8),
            config(quantization="fp8"),
            config(engine_args={"load_format": "safetensors"}),
            config(mode="server", urls=("http://127.0.0.1:8000",)),
        ):
            assert "load_format" not in own_arguments(kept, first)

    def test_room_for_an_adapter_is_made_only_where_one_may_come(self, config, context) -> None:
        assert "enable_lora" not in own_arguments(config(), context())
        assert own_arguments(config(max_adapter_rank=12), context())["max_lora_rank"] == 16

    def test_an_adapter_without_room_is_refused_before_anything_starts(self, config) -> None:
        assert "set rollout.max_adapter_rank=8" in config().adapter_problem(8)
        assert "the adapter has rank 16" in config(max_adapter_rank=8).adapter_problem(16)
        assert config(max_adapter_rank=16).adapter_problem(16) is None

    @pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (65, 128), (512, 512)])
    def test_room_is_the_next_of_vllms_ranks(self, rank: int, room: int) -> None:
        assert room_for(rank) == room

    def test_they_are_json_so_that_a_server_can_be_given_them(self, config, context) -> None:
        arguments = own_arguments(config(max_adapter_rank=4, max_model_len=128), context())
        assert json.loads(json.dumps(arguments)) == arguments


class TestRequests:
    @pytest.mark.parametrize(
        ("bad", "said"),
        [
            ({"prompt": ()}, "prompt is empty"),
            ({"prompt": (5, 300)}, "expected 0 to 299"),
            ({"prompt": (-1,)}, "expected 0 to 299"),
            ({"max_new_tokens": 0}, "max_new_tokens is 0"),
            ({"temperature": -0.5}, "temperature is -0.5"),
            ({"top_p": 0.0}, "top_p is 0.0"),
            ({"top_k": -2}, "top_k is -2"),
            ({"stop": ("a", "")}, "stop string"),
            ({"max_new_tokens": 62}, "3 prompt tokens and 62 new"),
            ({"raw_log_probs": True, "top_k": 3}, "before top_p and top_k"),
        ],
    )
    def test_what_cannot_be_generated_is_refused_in_words(self, bad, said: str) -> None:
        assert said in (
            problem_of(request(**bad), FACTS, engine="vLLM", log_probs="processed") or ""
        )

    def test_what_can_be_generated_is_not_refused(self) -> None:
        assert (
            problem_of(
                request(max_new_tokens=61, raw_log_probs=True),
                FACTS,
                engine="vLLM",
                log_probs="processed",
            )
            is None
        )

    def test_ends_of_sequence_are_stop_tokens_unless_ignored(self) -> None:
        sampling = request(stop_token_ids=(4, 9)).sampling
        assert with_ends(sampling, FACTS).stop_token_ids == (4, 9, 2)
        ignoring = request(ignore_eos=True, stop_token_ids=(4,)).sampling
        assert with_ends(ignoring, FACTS).stop_token_ids == (4,)

    def test_a_seed_is_63_bits_of_the_stream_and_its_offset(self) -> None:
        streams = [SampleStream(seed=1, sample=s, offset=o) for s in range(9) for o in range(9)]
        seeds = [sample_seed(stream) for stream in streams]
        assert seeds == [sample_seed(stream) for stream in streams]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 1 << 63 for seed in seeds)


class TestWire:
    def test_a_manifest_comes_back_from_json_as_it_was(self) -> None:
        spec = AdapterSpec(rank=4, alpha=8.0, target_modules=("k_proj", "q_proj"))
        tensors = (TensorSpec(name="a", shape=(2, 3), dtype="bfloat16"),)
        for kind, adapter in (("full", None), ("adapter", spec)):
            manifest = WeightManifest(
                version=7,
                kind=kind,
                tensors=tensors,
                adapter=adapter,
                receivers=2,
                rendezvous="here",
            )
            back = manifest_from(json.loads(json.dumps(manifest_info(manifest))))
            assert back == manifest
            assert back.update_id == manifest.update_id


class TestFailures:
    @pytest.mark.parametrize(
        ("printed", "kind", "said"),
        [
            (
                (
                    "Free memory on device cuda:0 (12.5/139.8 GiB) on startup is less than desired GPU memory "
                    "utilization (0.5, 69.9 GiB). Decrease"
                ),
                PlacementError,
                "gpu_memory_utilization=0.5 asks for 69.9 of 139.8 GiB, but only 12.5 GiB are free",
            ),
            (
                (
                    "To serve at least one request with the model's max seq len (32768), (0.38 GiB KV cache is needed, "
                    "which is larger than the available KV cache memory (0.21 GiB). Based"
                ),
                PlacementError,
                "but rollout.gpu_memory_utilization=0.5 leaves 0.21 GiB",
            ),
            (
                (
                    "User-specified max_model_len (9999) is greater than the derived max_model_len "
                    "(max_position_embeddings=4096 or model_max_length=None in model's config.json)."
                ),
                ConfigError,
                "rollout.max_model_len=9999 is",
            ),
            (
                (
                    "Available memory on node 0 (18.56/21.34 GiB) on startup is less than desired CPU memory "
                    "utilization (0.92, 19.63 GiB). On the CPU backend"
                ),
                PlacementError,
                "gpu_memory_utilization=0.92 asks for 19.63 of 21.34 GiB, but only 18.56 GiB are free",
            ),
            (
                (
                    "Available memory on node 0 (3.5/21.34 GiB) on kv cache allocation is less than requested memory "
                    "for kv (16.0 GiB). Decrease"
                ),
                PlacementError,
                "16.0 of the host's 21.34 GiB, but only 3.5 GiB are free",
            ),
            (
                "Model architectures ['FooForCausalLM'] are not supported for now.",
                ModelError,
                "its architecture is ['FooForCausalLM']",
            ),
            (
                (
                    "Model Runner V2 requires Triton; using the V1 model runner instead. Model Runner V2 does not yet support: "
                    "prompt embeds, dual batch overlap [type=value_error, input_value=ArgsKwargs]"
                ),
                ConfigError,
                "dual batch overlap",
            ),
        ],
    )
    def test_what_vllm_prints_becomes_an_error_with_its_numbers(
        self, tmp_path, printed: str, kind: type, said: str
    ) -> None:
        log = tmp_path / "log"
        log.write_text(
            f"(EngineCore pid=7) ERROR 11-21 18:27:55 [core.py:15] ValueError: {printed}\n"
        )
        error = FAILURES.start(RuntimeError("see above"), log, VllmRolloutConfig(name="vllm"))
        assert type(error) is kind
        assert said in error.message
        assert error.hint

    def test_an_unknown_failure_shows_the_end_of_the_log_without_its_marks(self, tmp_path) -> None:
        log = tmp_path / "log"
        lines = [f"(Worker pid=7) ERROR 11-21 18:27:55 [core.py:15] line {n}" for n in range(99)]
        log.write_text("\n".join(lines))
        assert FAILURES.tail_of(log, 2) == "line 97\nline 98"
        error = FAILURES.start(RuntimeError("boom"), log, VllmRolloutConfig(name="vllm"))
        assert "RuntimeError: boom" in error.message
        assert error.message.endswith("line 98")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of CPUs alone")
def test_workers_on_a_cpu_share_its_cores(monkeypatch, config, context, tmp_path) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7})
    name = "VLLM_CPU_OMP_THREADS_BIND"
    assert variables(config(tensor_parallel_size=2), context(), tmp_path)[name] == "1,2|5,7"
    assert name not in variables(config(), context(), tmp_path)
    monkeypatch.setenv(name, "nobind")
    assert name not in variables(config(tensor_parallel_size=2), context(), tmp_path)


class TestModelRunner:
    @pytest.fixture(autouse=True)
    def accelerated(self, monkeypatch) -> None:
        monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def chosen(self, context, tmp_path, settings) -> str | None:
        return variables(settings, context(), tmp_path).get(RUNNER_VARIABLE)

    def test_v2_is_taken_for_a_model_that_passed_on_its_release(
        self, release, config, context, tmp_path
    ) -> None:
        release(vllm="0.24.0")
        tried = {"max_num_batched_tokens": 9, "kv_cache_memory_bytes": 2**31}
        for settings in ({}, {"mode": "server"}, {"engine_args": tried}):
            assert self.chosen(context, tmp_path, config(**settings)) == "1"

    @pytest.mark.parametrize(
        ("version", "settings"),
        [
            ("0.23.0", {}),
            ("0.32.0", {}),
            ("0.24.0", {"tensor_parallel_size": 2}),
            ("0.24.0", {"engine_args": {"speculative_config": {"method": "ngram"}}}),
        ],
    )  # fmt: skip
    def test_what_was_not_tried_is_left_to_vllm(
        self, release, config, context, tmp_path, version: str, settings: dict[str, Any]
    ) -> None:
        release(vllm=version)
        assert self.chosen(context, tmp_path, config(**settings)) is None

    def test_another_model_is_left_to_vllm(self, release, config, context, tiny, tmp_path) -> None:
        other = tmp_path / "other"
        shutil.copytree(tiny, other)
        values = json.loads((other / "config.json").read_text())
        values["architectures"] = ["Gemma2ForCausalLM"]
        (other / "config.json").write_text(json.dumps(values))
        release(vllm="0.24.0")
        there = attrs.evolve(context(), model=ModelSection(path=str(other), dtype="bfloat16"))
        assert RUNNER_VARIABLE not in variables(config(), there, tmp_path)

    def test_a_choice_outranks_the_environment_and_the_environment_outranks_auto(
        self, release, config, context, tmp_path, monkeypatch
    ) -> None:
        release(vllm="0.24.0")
        monkeypatch.setenv(RUNNER_VARIABLE, "0")
        assert self.chosen(context, tmp_path, config()) is None
        monkeypatch.setattr(DrivenEngine, "defines", lambda *_: True)
        assert self.chosen(context, tmp_path, config(model_runner="v2")) == "1"
        assert self.chosen(context, tmp_path, config(model_runner="v1")) == "0"

    def test_a_release_with_one_runner_has_no_choice(
        self, release, config, context, tmp_path, monkeypatch
    ) -> None:
        release(vllm="0.40.0")
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "envs.py").write_text("VLLM_HOST_IP: str = ''\n")
        monkeypatch.setattr(releases, "_directory", lambda package: tmp_path / package)
        with pytest.raises(
            ConfigError, match=r"model_runner=v2 can.*vllm 0\.40\.0 has.*model runner"
        ):
            variables(config(model_runner="v2"), context(), tmp_path)

    def test_servers_that_are_joined_have_theirs(self, config) -> None:
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
            config(mode="server", urls=("http://127.0.0.1:1",), model_runner="v2")
