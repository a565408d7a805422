"""A judge on a real vLLM server that it starts: the protocol is real, what a random model says is nonsense."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dovetail.interfaces import FailureKind, PluginContext
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.judge_server_config import JudgeServerConfig
from dovetail_rewards.models.judge import JudgeManager
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


def test_a_random_model_judges_and_its_nonsense_is_no_score(
    tmp_path: Path, sample, run, monkeypatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # vLLM has no smaller heads than 32 on a CPU
    model = tiny_model_and_tokenizer(tmp_path / "judge", vocab_size=300, hidden_size=128)
    config = JudgeConfig(
        name="judge",
        model=str(model),
        system="Grade.",
        template="{{ prompt }} {{ response }} Score?",
        # any character is the verdict "said", and what is empty has none
        pattern=r"(?s)(?P<score>).+",
        labels={"": 1.0},
        temperature=1.0,
        votes=2,
        max_tokens=8,
        extra_body={"seed": 3, "ignore_eos": True},
        tries=2,
        server=JudgeServerConfig(
            arguments={"max_model_len": 128, "enforce_eager": True, "dtype": "float32"},
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
            start_timeout=800.0,
        ),
    )
    manager = JudgeManager(config, PluginContext(run_directory=tmp_path))
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
    assert (tmp_path / "logs" / "judge.log").stat().st_size > 0
