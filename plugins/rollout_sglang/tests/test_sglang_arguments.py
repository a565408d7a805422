"""Arguments, refusals and error messages; SGLang is not needed."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from typing import Any

import attrs
import pytest
import torch

from dovetail.errors import ConfigError, ModelError, PlacementError, PluginNeedsError, RolloutError
from dovetail.interfaces import PluginRef
from dovetail.plugins import make_plugin
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.engine_args import own_arguments, server_arguments, server_command
from dovetail_rollout_sglang.failures import FAILURES
from dovetail_rollout_sglang.serve import meant, settled


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:30000"]], ids=["started", "joined"])
def test_servers_that_are_joined_need_no_sglang_here(monkeypatch, config, context, urls) -> None:
    installed = importlib.metadata.version

    def without(name: str) -> str:
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    ref = PluginRef(kind="rollout", name="sglang", config=config(urls=urls))
    if urls:
        make_plugin(ref, context())
    else:
        with pytest.raises(PluginNeedsError, match=r"needs sglang>=0\.5\.12"):
            make_plugin(ref, context())


class TestArguments:
    def test_ours_hold_over_the_users_and_one_warning_says_so(
        self, config, context, caplog
    ) -> None:
        theirs = {"random_seed": 3, "sampling_defaults": "model", "chunked_prefill_size": 17}
        with caplog.at_level(logging.WARNING):
            found = server_arguments(config(engine_args=theirs), context())
        assert found["chunked_prefill_size"] == 17
        assert found["sampling_defaults"] == "openai"
        (record,) = caplog.records
        said = record.getMessage()
        assert "sampling_defaults='model' (Dovetail sets 'openai')" in said
        assert "random_seed=3" in said
        assert "chunked_prefill_size" not in said

    def test_replicas_draw_differently(self, config, context) -> None:
        seeds = {own_arguments(config(), context(rank=r))["random_seed"] for r in range(8)}
        assert len(seeds) == 8

    def test_weights_on_disk_stay_unread_only_where_whole_ones_follow(
        self, config, context
    ) -> None:
        first = attrs.evolve(context(), weights_follow=True)
        assert own_arguments(config(), first)["load_format"] == "dummy"
        assert "load_format" not in own_arguments(config(), context())
        for kept in (
            config(quantization="fp8"),
            config(engine_args={"load_format": "safetensors"}),
            config(urls=("http://127.0.0.1:30000",)),
        ):
            assert "load_format" not in own_arguments(kept, first)

    def test_room_for_adapters_is_made_where_it_is_asked_for(self, config, context) -> None:
        assert "enable_lora" not in own_arguments(config(), context())
        chosen = config(max_adapter_rank=16, adapter_modules=("q_proj", "o_proj"))
        found = own_arguments(chosen, context())
        assert found["enable_lora"] is True
        assert found["max_lora_rank"] == 16
        assert found["lora_target_modules"] == ["o_proj", "q_proj"]
        # The weights below an adapter are read from disk, since no update brings them.
        follow = attrs.evolve(context(), weights_follow=True)
        assert "load_format" not in own_arguments(chosen, follow)

    def test_graphs_are_captured_for_as_many_samples_as_may_run(
        self, config, context, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def graphs(**settings: Any) -> int | None:
            return own_arguments(config(**settings), context()).get("cuda_graph_max_bs")

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        assert graphs() == 512
        assert graphs(max_num_seqs=100) == 100
        assert graphs(max_num_seqs=5000) == 1024
        assert graphs(enforce_eager=True) is None
        assert graphs(engine_args={"cuda_graph_max_bs_decode": 32}) is None

    def test_fp8_is_passed_on(self, config, context) -> None:
        found = server_arguments(config(quantization="fp8", kv_cache_dtype="fp8_e5m2"), context())
        assert (found["quantization"], found["kv_cache_dtype"]) == ("fp8", "fp8_e5m2")

    def test_seeds_ask_for_the_inference_that_heeds_them(self, config, context) -> None:
        chosen = own_arguments(config(seeding="per_sample"), context())
        assert chosen["enable_deterministic_inference"] is True
        assert "enable_deterministic_inference" not in own_arguments(config(), context())

    def test_the_command_carries_them_as_json(self, config, context) -> None:
        command = server_command(config(max_model_len=128), context(), host="127.0.0.1", port=1234)
        arguments = json.loads(command[-1])
        assert (arguments["host"], arguments["port"]) == ("127.0.0.1", 1234)
        assert arguments["context_length"] == 128


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine_args": {"dp_size": 2}}, "several copies of the model.*rollout.replicas"),
        ({"engine_args": {"pp_size": 2}}, "stages of a pipeline.*tensor_parallel_size"),
        ({"engine_args": {"nnodes": 2}}, "runs on one machine.*rollout.replicas"),
        ({"engine_args": {"grpc_port": 9000}}, "grpc_port=9000 .* no access token"),
        (
            {
                "engine_args": {"dp_size": 4, "enable_dp_attention": True},
                "tensor_parallel_size": 2,
            },
            "dp_size=4 does not divide rollout.tensor_parallel_size=2",
        ),
        (
            {
                "engine_args": {"dp_size": 2, "enable_dp_attention": True},
                "tensor_parallel_size": 2,
                "max_adapter_rank": 4,
            },
            "max_adapter_rank does not work with enable_dp_attention.*merged",
        ),
        ({"engine_args": {"dp_size": 0, "enable_dp_attention": True}}, "dp_size=0 is not allowed"),
        ({"engine_args": {"dp_size": "two"}}, "dp_size='two' is not allowed"),
    ],
)
def test_arguments_that_an_update_or_the_token_contradicts_are_refused_with_the_config(
    config, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){said}"):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 3}, "does not divide the 4 attention heads.*one of 1, 2, 4"),
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 2},
            "expert_parallel_size=2 needs experts.*has none.*leave rollout.expert_parallel_size out",
        ),
    ],
)
def test_a_layout_that_the_model_contradicts_is_refused(
    config, context, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){said}"):
        server_arguments(config(**settings), context())


def test_a_layout_that_the_model_divides_into_is_taken(config, context) -> None:
    assert server_arguments(config(tensor_parallel_size=4), context())["tp_size"] == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urls": ("10.0.0.2:30000",)}, "server's address"),
        ({"urls": ("http://a:1", "http://a:1/")}, "server twice"),
        ({"port": 8000, "urls": ("http://a:1",)}, "joins servers"),
        ({"expert_parallel_size": 2}, "does not divide rollout.tensor_parallel_size=1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SglangRolloutConfig(name="sglang", **settings)


def test_a_server_that_wants_a_token_is_not_warmed_up_without_one() -> None:
    told, known = {"port": 30000}, {"port", "skip_server_warmup"}
    assert settled(told, known, guarded=True) == {"port": 30000, "skip_server_warmup": True}
    assert settled(told, known, guarded=False) == told


def test_an_argument_that_sglang_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no server argument 'tp'.*did you mean 'tp_size'"):
        settled({"tp": 2}, {"tp_size"}, guarded=False)


def test_a_name_that_is_none_is_answered_with_the_argument_that_is_meant() -> None:
    known = {"ep_join_mode", "ep_size", "dtype", "attention_backend"}
    assert meant("ep", known) == "ep_size"
    assert meant("attention_backends", known) == "attention_backend"
    assert meant("nothing_of_the_kind", known) is None


class TestFailures:
    @pytest.mark.parametrize(
        ("printed", "kind", "said"),
        [
            (
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
                PlacementError,
                "rollout.gpu_memory_utilization=0.5 leaves",
            ),
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
                PlacementError,
                "too little free",
            ),
            (
                "User-specified context_length (9999) is greater than the derived context_length (4096).",
                ConfigError,
                "rollout.max_model_len=9999 is",
            ),
            (
                "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
                ModelError,
                "its architecture is ['FooForCausalLM']",
            ),
            (
                (
                    "ValueError: Currently only ['fa3', 'triton'] attention backends are supported for deterministic inference, "
                    "but you explicitly specified 'torch_native'."
                ),
                ConfigError,
                "deterministic inference, which attention_backend 'torch_native' does not support",
            ),
        ],
    )
    def test_what_sglang_prints_becomes_an_error_with_its_numbers(
        self, tmp_path, config, printed: str, kind: type, said: str
    ) -> None:
        log = tmp_path / "log"
        log.write_text(f"[2026-11-21 18:27:55 TP0] {printed}\n")
        error = FAILURES.start(RuntimeError("the server ended"), log, config())
        assert type(error) is kind
        assert said in error.message
        assert error.hint

    def test_an_unknown_failure_shows_the_end_of_the_log_without_its_marks(
        self, tmp_path, config
    ) -> None:
        log = tmp_path / "log"
        log.write_text("\n".join(f"[2026-11-21 18:27:55 TP0 EP0] line {n}" for n in range(99)))
        error = FAILURES.start(RuntimeError("boom"), log, config())
        assert type(error) is RolloutError
        assert "RuntimeError: boom" in error.message
        assert error.message.endswith("\nline 98")


def test_overrides_of_the_models_config_reach_the_server_as_json(config, context) -> None:
    made = context()
    model = attrs.evolve(made.model, override_config={"rope_theta": 37.0})
    arguments = own_arguments(config(), attrs.evolve(made, model=model))
    rope = json.loads(arguments["json_model_override_args"])["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": 37.0}
    assert "json_model_override_args" not in own_arguments(config(), made)
