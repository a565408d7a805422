"""Failing starts, and servers that can't be joined: each gives one clear error, and no process is left."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from dovetail.errors import DovetailError
from dovetail.interfaces import PluginContext
from dovetail_rollout_vllm import server_start
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.server_backend import VllmServerBackend
from dovetail_rollout_vllm.server_command import ROUTES, command_by_hand, server_command
from dovetail_sdk.testing.fake_server import words_of
from dovetail_serving import PROTOCOL
from dovetail_serving.testing import frame_of

FITTING: dict[str, Any] = {
    "protocol": PROTOCOL,
    "vllm": "0.32.0",
    "model": "/models/tiny",
    "architectures": ["Qwen2ForCausalLM"],
    "shape": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300},
    "dtype": "float32",
    "max_model_len": 512,
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "sleep": False,
    "tokenizer": True,
    "ranks": 1,
    "data_parallel": 1,
    "api_servers": 1,
    "weight_transfer": "dovetail",
    "worker_extension": "dovetail_rollout_vllm.worker_methods.WorkerMethods",
    "adapter_rank": None,
    "parts": {},
    "base": {"replaced": False, "whole": True, "version": None, "since": None},
}
"""Description that a server which fits the tiny model gives of itself."""


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a Python program be started in vLLM's place."""

    def use(program: str) -> None:
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(server_start, "server_command", lambda *_, **__: command)
        monkeypatch.setattr(server_start, "require", lambda logger: None)

    return use


def failure(context: PluginContext, **config: Any) -> DovetailError:
    backend = VllmServerBackend(VllmRolloutConfig(name="vllm", mode="server", **config), context)
    with pytest.raises(DovetailError) as found:
        backend.start()
    assert not backend.alive()
    return found.value


def test_a_server_that_ends_is_reported_with_what_it_printed(
    context: PluginContext, started_with: Any
) -> None:
    started_with("import sys; print('no such kernel'); sys.exit(7)")
    error = failure(context)
    assert "ended with status 7" in error.message
    assert "no such kernel" in error.message
    log = Path(str(context.run_directory)) / "logs" / "rollout-0.vllm.log"
    assert "no such kernel" in log.read_text()


def test_a_server_that_never_becomes_healthy_is_reported_and_ended(
    context: PluginContext, started_with: Any
) -> None:
    started_with("import time; print('still thinking', flush=True); time.sleep(600)")
    error = failure(context, start_timeout=1.0)
    assert "not healthy within rollout.start_timeout=1 s" in error.message
    assert "still thinking" in error.message


def test_a_port_that_is_taken_is_reported_before_anything_starts(
    context: PluginContext, started_with: Any
) -> None:
    started_with("raise SystemExit('started all the same')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        third = attrs.evolve(context, rank=2)
        error = failure(third, port=port - 2)
    assert f"127.0.0.1:{port}: the port is in use" in error.message
    assert not list(Path(str(context.run_directory)).rglob("*.log"))


def test_a_port_that_is_taken_meanwhile_is_reported(
    context: PluginContext, started_with: Any
) -> None:
    started_with("raise OSError('[Errno 98] Address already in use')")
    assert "another process" in failure(context).message


def test_a_server_that_fits_is_joined_and_left_as_it_is(fake: Any, context: PluginContext) -> None:
    fake.answers |= {
        "/version": words_of({"version": "0.32.0"}),
        "/dovetail/v1/describe": frame_of(FITTING),
    }
    config = VllmRolloutConfig(name="vllm", mode="server", urls=(f"{fake.url}/",))
    backend = VllmServerBackend(config, context)
    backend.start()
    assert backend.alive()
    backend.close()
    assert set(fake.asked) == {"/version", "/dovetail/v1/describe"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vllm": "0.31.0"},
            "it is vLLM 0.31.0; 0.32 or",
        ),
        ({"dtype": "bfloat16"}, "--dtype is 'bfloat16', not 'float32'"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode is 'raw_logprobs'"),
        ({"weight_transfer": None}, "--weight-transfer-config is None, not 'dovetail'"),
        ({"worker_extension": ""}, "--worker-extension-cls is ''"),
        ({"ranks": 2}, "parallel sizes is 2, not 1"),
        ({"data_parallel": 4}, "--data-parallel-size is 4, not 1"),
        ({"api_servers": 2}, "--api-server-count is 2, not 1"),
        ({"max_model_len": 100}, "--max-model-len is 100, below 256"),
        ({"tokenizer": False}, "rollout.stop needs a tokenizer"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM"),
        (
            {"shape": {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 300}},
            "has hidden_size=128, but",
        ),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_command_of_one_that_does(
    fake: Any, context: PluginContext, changes: dict[str, Any], said: str
) -> None:
    fake.answers |= {
        "/version": words_of({"version": "0.32.0"}),
        "/dovetail/v1/describe": frame_of(FITTING | changes),
    }
    error = failure(context, urls=(fake.url,), max_model_len=256, stop=("\n",), keep_cache=True)
    assert said in error.message
    assert "--weight-transfer-config" in str(error.hint)
    assert f"--port {fake.url.rsplit(':', 1)[1]}" in str(error.hint)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"whole": True, "version": 7}, "update 7 of another run"),
        ({"whole": False, "version": None}, "incomplete weights"),
    ],
)
def test_weights_of_another_run_are_refused_where_none_follow(
    fake: Any, context: PluginContext, base: dict[str, Any], said: str
) -> None:
    replaced = {"replaced": True, "since": 1.7e9, **base}
    fake.answers |= {
        "/version": words_of({"version": "0.32.0"}),
        "/dovetail/v1/describe": frame_of(FITTING | {"base": replaced}),
    }
    error = failure(context, urls=(fake.url,))
    assert said in error.message
    assert "2023-11-1" in error.message
    assert "DOVETAIL_VLLM_TOKEN=" in str(error.hint)
    config = VllmRolloutConfig(name="vllm", mode="server", urls=(fake.url,))
    backend = VllmServerBackend(config, attrs.evolve(context, weights_follow=True))
    backend.start()
    backend.close()


def test_all_that_does_not_fit_is_said_at_once(fake: Any, context: PluginContext) -> None:
    fake.answers |= {
        "/version": words_of({"version": "0.32.0"}),
        "/dovetail/v1/describe": frame_of(FITTING | {"dtype": "float16", "ranks": 8}),
    }
    error = failure(context, urls=(fake.url,))
    assert "float16" in error.message
    assert "sizes is 8" in error.message


def test_a_server_of_another_protocol_is_refused(fake: Any, context: PluginContext) -> None:
    fake.answers |= {
        "/version": words_of({"version": "0.99.0"}),
        "/dovetail/v1/describe": frame_of({"protocol": 99}),
    }
    assert "version 99 of Dovetail's protocol" in failure(context, urls=(fake.url,)).message


def test_a_vllm_without_dovetails_routes_is_told_apart_from_other_servers(
    fake: Any, context: PluginContext
) -> None:
    assert "vLLM server" in failure(context, urls=(fake.url,)).message
    fake.answers["/version"] = words_of({"version": "0.24.0"})
    error = failure(context, urls=(fake.url,))
    assert f"(vLLM 0.24.0) was started without --middleware {ROUTES}" in error.message
    fake.answers["/dovetail/v1/describe"] = words_of({"error": "who?"}, 401)
    error = failure(context, urls=(fake.url,))
    assert "DOVETAIL_VLLM_TOKEN" in str(error.hint)


def test_a_url_where_nobody_answers_is_reported(fake: Any, context: PluginContext) -> None:
    fake.close()
    assert f"no server answers at {fake.url}" in failure(context, urls=(fake.url,)).message


def test_a_replica_without_a_url_is_an_error(fake: Any, context: PluginContext) -> None:
    error = failure(attrs.evolve(context, rank=2), urls=(fake.url, "http://127.0.0.1:9"))
    assert "rollout.urls has 2 URLs" in error.message


def test_engine_arguments_reach_the_command_line(context: PluginContext) -> None:
    config = VllmRolloutConfig(
        name="vllm",
        mode="server",
        max_model_len=128,
        engine_args={
            "max_num_seqs": 16,
            "async_scheduling": False,
            "enable_expert_parallel": True,
            "compilation_config": {"level": 0},
            "hf_token": None,
            "served_model_name": ["a", "b"],
        },
    )
    command = server_command(config, context, host="127.0.0.1", port=1234)
    line = " ".join(command)
    assert "--max-num-seqs=16 --no-async-scheduling --enable-expert-parallel" in line
    assert '--compilation-config {"level": 0}' in line
    assert "--served-model-name a b" in line
    assert "--hf-token" not in line
    assert "--max-model-len=128" in line
    assert f"--host 127.0.0.1 --port 1234 --middleware {ROUTES}" in line
    by_hand = command_by_hand(config, context, port=8000)
    assert "--max-num-seqs=16" in by_hand
    assert by_hand.startswith("python -m vllm.entrypoints.openai.api_server ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urls": ("10.0.0.2:8000",), "mode": "server"}, "server's address"),
        ({"urls": ("http://a:1",)}, "rollout.mode=engine"),
        ({"urls": ("http://a:1", "http://a:1"), "mode": "server"}, "server twice"),
        ({"urls": ("http://a:1", "http://a:1/"), "mode": "server"}, "server twice"),
        ({"port": 8000}, "has mode 'engine'"),
        ({"port": 8000, "urls": ("http://a:1",), "mode": "server"}, "joins servers"),
    ],
)
def test_servers_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VllmRolloutConfig(name="vllm", **settings)


def test_there_are_as_many_replicas_as_urls() -> None:
    config = VllmRolloutConfig(name="vllm", mode="server", urls=("http://a:1", "http://b:1"))
    assert config.joined == 2
    assert VllmRolloutConfig(name="vllm", mode="server").joined == 0
