"""The preflight rule that a replica's ranks divide the model's heads and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig


@pytest.fixture
def model(tmp_path: Path) -> dict[str, str]:
    MixtralConfig(
        num_attention_heads=12, num_key_value_heads=4, num_local_experts=6
    ).save_pretrained(tmp_path)
    return {"path": str(tmp_path)}


def rollout(name: str, ranks: int, **settings: Any) -> dict[str, Any]:
    return {"name": name, "tensor_parallel_size": ranks, **settings}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (5, "tensor_parallel_size=5 does not divide"),
        (6, "12 attention heads and 4 key-value heads"),
    ],
)
def test_ranks_that_do_not_divide_the_heads_are_refused(
    judge: Any, model: Any, engine: str, ranks: int, words: str
) -> None:
    (finding,) = judge("rollout_layout", {"model": model, "rollout": rollout(engine, ranks)})
    assert finding.severity == "error"
    assert words in finding.message
    assert finding.hint == "set rollout.tensor_parallel_size to one of 1, 2, 4, 12"


def test_experts_are_spread_over_what_divides_them(judge: Any, model: Any) -> None:
    spread = rollout("sglang", 4, expert_parallel_size=4)
    (finding,) = judge("rollout_layout", {"model": model, "rollout": spread})
    assert "expert_parallel_size=4 does not divide the 6 experts" in finding.message
    assert finding.hint == "set rollout.expert_parallel_size to one of 1, 2, 3, 6"


@pytest.mark.parametrize(
    "section",
    [
        rollout("sglang", 2),
        rollout("sglang", 12),
        rollout("sglang", 2, expert_parallel_size=2),
        rollout("sglang", 5, urls=["http://127.0.0.1:30000"]),
        {"name": "hf"},
    ],
)
def test_what_divides_it_or_runs_already_is_not_spoken_of(
    judge: Any, model: Any, section: Any
) -> None:
    assert judge("rollout_layout", {"model": model, "rollout": section}) == []


@pytest.mark.parametrize(
    "config",
    [
        "{",
        '{"model_type": "of tomorrow"}',
        '{"model_type": "llama", "hidden_size": "32"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
    ],
)
def test_a_config_that_transformers_can_not_read_is_left_to_the_engine(
    judge: Any, tmp_path: Path, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    model = {"path": str(tmp_path)}
    assert judge("rollout_layout", {"model": model, "rollout": rollout("vllm", 5)}) == []
    lora = {"name": "fsdp2", "lora": {"rank": 4, "target_modules": ["q_porj"]}}
    assert judge("adapter_targets", {"model": model, "actor": {"engine": lora}}) == []
    (missing,) = judge(
        "model_missing",
        {"algorithm": {"advantage": "gae"}, "critic": {"path": str(tmp_path)}},
    )
    assert "holds no model" in missing.message


def test_ranks_that_attend_to_other_samples_divide_no_heads(judge: Any, model: Any) -> None:
    """With data-parallel attention, 8 ranks each hold all 12 heads, or divide them by 2 in 4 groups."""
    apart = [
        rollout("sglang", 8, engine_args={"dp_size": 8, "enable_dp_attention": True}),
        rollout("sglang", 8, engine_args={"dp_size": 4, "enable_dp_attention": True}),
        rollout("trtllm", 8, engine_args={"enable_attention_dp": True}),
    ]
    for section in apart:
        assert judge("rollout_layout", {"model": model, "rollout": section}) == []
    together = rollout("trtllm", 8)
    assert judge("rollout_layout", {"model": model, "rollout": together})


def test_a_model_that_is_not_here_is_left_to_the_engine(judge: Any) -> None:
    sections = {"model": {"path": "some/hub-id"}, "rollout": rollout("vllm", 5)}
    assert judge("rollout_layout", sections) == []
