"""Servers: refusals before a start, servers that can be joined, and authorization; SGLang is not needed."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import DovetailError, WeightSyncError
from dovetail.interfaces import AdapterSpec, TensorSpec, WeightManifest
from dovetail_rollout_sglang import backend as backend_module
from dovetail_rollout_sglang.backend import SglangBackend
from dovetail_rollout_sglang.environment import TOKEN_VARIABLE
from dovetail_rollout_sglang.hooks import end_at_stop_tokens
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.routes import SglangRoutes
from dovetail_sdk.testing.fake_server import words_of
from dovetail_serving import PROTOCOL
from dovetail_serving.testing import frame_of

FITTING: dict[str, Any] = {
    "protocol": PROTOCOL,
    "sglang": "0.5.15",
    "model": "/models/tiny",
    "architectures": ["Qwen2ForCausalLM"],
    "shape": {},
    "dtype": "float32",
    "max_model_len": 512,
    "quantization": None,
    "sleep": False,
    "seeds": False,
    "tokenizer": True,
    "ranks": 1,
    "stages": 1,
    "copies": 1,
}
"""Description that a server which fits the tiny model gives of itself."""


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a Python program be started in SGLang's place."""

    def use(program: str) -> None:
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(backend_module, "server_command", lambda *_, **__: command)
        monkeypatch.setattr(backend_module, "require", lambda logger: None)

    return use


def failure(config: Any, context: Any) -> DovetailError:
    backend = SglangBackend(config, context)
    with pytest.raises(DovetailError) as found:
        backend.start()
    assert not backend.alive()
    return found.value


def test_a_server_that_ends_is_reported_with_what_it_printed(config, context, started_with) -> None:
    started_with("import sys; print('no such kernel'); sys.exit(7)")
    error = failure(config(), context())
    assert "ended with status 7" in error.message
    assert "no such kernel" in error.message


def test_a_server_that_never_becomes_healthy_is_reported(config, context, started_with) -> None:
    started_with("import time; print('still thinking', flush=True); time.sleep(600)")
    error = failure(config(start_timeout=1.0), context())
    assert "not healthy within rollout.start_timeout=1 s" in error.message
    assert "still thinking" in error.message


def test_a_server_that_fits_is_joined_and_left_as_it_is(fake, config, context) -> None:
    fake.answers |= {
        "/model_info": words_of({"model_path": "/models/tiny"}),
        "/dovetail/v1/describe": frame_of(FITTING),
    }
    backend = SglangBackend(config(urls=(fake.url,)), context())
    backend.start()
    assert backend.alive()
    backend.close()
    assert set(fake.asked) == {"/model_info", "/dovetail/v1/describe"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": 99}, "version 99 of Dovetail's protocol"),
        ({"sglang": "0.5.11"}, "it is SGLang 0.5.11; 0.5.12 or"),
        ({"dtype": "bfloat16"}, "its dtype is 'bfloat16', not 'float32'"),
        ({"ranks": 2}, "its tp_size is 2, not 1"),
        ({"copies": 4}, "its dp_size is 4, not 1"),
        (
            {"replaced": {"version": 7, "whole": True, "since": 0.0}},
            "it holds update 7 of",
        ),
        ({"adapter_rank": 4}, "adapters of rank 8"),
        ({"max_model_len": 100}, "its context_length is 100, below 256"),
        ({"tokenizer": False}, "rollout.stop needs a tokenizer"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM"),
        ({"shape": {"hidden_size": 7}}, "has hidden_size=7, but"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_command_of_one_that_does(
    fake, config, context, changes: dict[str, Any], said: str
) -> None:
    fake.answers |= {
        "/model_info": words_of({"model_path": "/models/tiny"}),
        "/dovetail/v1/describe": frame_of(FITTING | changes),
    }
    chosen = config(urls=(fake.url,), max_model_len=256, stop=("\n",), max_adapter_rank=8)
    error = failure(chosen, context())
    assert said in error.message
    assert "python -m dovetail_rollout_sglang.serve '{" in str(error.hint)
    assert f'"port": {fake.url.rsplit(":", 1)[1]}' in str(error.hint)


def test_a_run_that_sends_whole_weights_joins_whatever_the_server_holds(
    fake, config, context
) -> None:
    held = {"replaced": {"version": 7, "whole": False, "since": 0.0}}
    fake.answers |= {
        "/model_info": words_of({"model_path": "/models/tiny"}),
        "/dovetail/v1/describe": frame_of(FITTING | held),
    }
    backend = SglangBackend(config(urls=(fake.url,)), context(weights_follow=True))
    backend.start()
    assert backend.alive()
    backend.close()


def test_a_plain_server_is_told_apart_from_one_that_is_no_sglang(fake, config, context) -> None:
    chosen = config(urls=(fake.url,))
    assert "SGLang server" in failure(chosen, context()).message
    # A server that gives the same answer to every request is no SGLang server either.
    fake.answers |= dict.fromkeys(
        ("/model_info", "/dovetail/v1/describe"), words_of({"hello": "there"})
    )
    assert "SGLang server" in failure(chosen, context()).message
    fake.answers["/model_info"] = words_of({"model_path": "/models/tiny"})
    error = failure(chosen, context())
    assert "not started with dovetail_rollout_sglang.serve" in error.message
    fake.answers["/dovetail/v1/describe"] = words_of({"error": "who?"}, 401)
    assert TOKEN_VARIABLE in str(failure(chosen, context()).hint)


def test_an_adapter_is_refused_before_anything_is_sent(config, context) -> None:
    manifest = WeightManifest(
        version=1,
        kind="adapter",
        tensors=(TensorSpec(name="w", shape=(1,), dtype="float32"),),
        adapter=AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",)),
    )
    rollout = SglangRollout(config(), context(transport=object()))
    with pytest.raises(WeightSyncError, match="no room"):
        rollout.check_manifest(1, manifest)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/update_weights_from_tensor", 401), ("/generate", 401), ("/health", 418)],
)
def test_sglangs_own_paths_want_the_token_too(
    monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    import httpx2

    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async def sglangs_own(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(**headers: str) -> int:
        transport = httpx2.ASGITransport(app=SglangRoutes(sglangs_own))
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.post(path, headers=headers)).status_code

    assert asyncio.run(ask()) == status
    assert asyncio.run(ask(authorization="Bearer wrong")) == status
    assert asyncio.run(ask(authorization="Bearer secret")) == 418


def test_samples_without_stop_tokens_of_their_own_are_left_to_sglang() -> None:
    seen: list[Any] = []

    def check(sample: Any, new_ids: Any) -> bool:
        seen.append(new_ids)
        return True

    for ignore_eos, stops in ((True, ()), (False, (3,))):
        params = SimpleNamespace(ignore_eos=ignore_eos, stop_token_ids=stops)
        assert end_at_stop_tokens(check, SimpleNamespace(sampling_params=params), [3])
    assert seen == [[3], [3]]
