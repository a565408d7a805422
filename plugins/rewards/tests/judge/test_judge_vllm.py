"""A judge on a real vLLM server with a random model, whose answers are nonsense; only the protocol is tested."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from dovetail.interfaces import FailureKind, PluginContext
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.models.judge import JudgeManager
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_serving import free_port

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


@contextlib.contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """Yield the base URL of a server of this model, which ends with the context."""
    port = free_port()
    options = {"max-model-len": "128", "dtype": "float32", "host": "127.0.0.1", "port": str(port)}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    server = subprocess.Popen(
        [*command, "--enforce-eager"],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        while True:
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def test_a_random_model_judges_and_its_nonsense_is_no_score(
    tmp_path: Path, sample, run, monkeypatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # On a CPU, vLLM needs heads of at least 32 dimensions.
    model = tiny_model_and_tokenizer(tmp_path / "judge", vocab_size=300, hidden_size=128)
    config = JudgeConfig(
        name="judge",
        model=str(model),
        system="Grade.",
        template="{{ prompt }} {{ response }} Score?",
        # Any answer with a character has a verdict; an empty answer has none.
        pattern=r"(?s)(?P<score>).+",
        labels={"": 1.0},
        temperature=1.0,
        votes=2,
        max_tokens=8,
        extra_body={"seed": 3, "ignore_eos": True},
        tries=2,
        url="http://127.0.0.1:9/v1",
    )
    with vllm_server(model) as url:
        manager = JudgeManager(attrs.evolve(config, url=url), PluginContext())
        try:
            manager.start()
            outcomes = run(manager, [sample(f"s{i}", str(i)) for i in range(4)], timeout=240.0)
            too_long = run(manager, [sample("long", "word " * 400)], timeout=240.0)["long"]
        finally:
            manager.close()
    for outcome in outcomes.values():
        assert outcome.value == 1.0
        assert outcome.components["votes"] == 2
        assert outcome.extras["judgement"]
    assert too_long.kind is FailureKind.EXCEPTION, "a request that vLLM refuses"
    assert "status 400" in too_long.message
