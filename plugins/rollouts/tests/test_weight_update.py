"""Size and duration of a weight update by each transport, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from dovetail.config import config_from_mapping
from dovetail.planning.plan import make_plan
from dovetail_rollouts.plan_lines import weight_update

VOCABULARY, HIDDEN, INNER, LAYERS = 40, 16, 32, 3
BIASES = HIDDEN + 2 * 8
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 8
LAYER = ATTENTION + BIASES + 3 * HIDDEN * INNER + 2 * HIDDEN
EMBEDDING = VOCABULARY * HIDDEN
BASE = 2 * EMBEDDING + LAYERS * LAYER + HIDDEN
"""Number of parameters: two query heads of eight features, one KV head, and a separate output layer."""
LORA = {"name": "fsdp2", "lora": {"rank": 4, "target_modules": ["q_proj", "k_proj"]}}
ADAPTERS = LAYERS * 4 * ((HIDDEN + HIDDEN) + (HIDDEN + 8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    written(directory, "bfloat16")
    return directory


def written(directory: Path, dtype: str, **sizes: Any) -> None:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **sizes,
    }
    Qwen2Config(**settings).save_pretrained(directory)


def planned(path: Path, *overrides: str, **sections: Any) -> Any:
    mapping = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "data": {"train_batch_size": 4, "max_prompt_length": 6, "max_response_length": 4},
        "rollout": {"n": 2},
        **sections,
    }
    config = config_from_mapping(mapping, overrides).config
    return config, make_plan(config)


MACHINES = {"name": "ray", "nodes": 4, "gpus_per_node": 8, "address": "auto"}
GENERATE = {"roles": "rollout", "nodes": 2}
BYTES = 2 * BASE


@pytest.mark.parametrize(
    ("runtime", "overrides", "seconds"),
    [
        ({"name": "inline", "device": "cpu"}, (), None),
        (
            {"name": "ray", "gpus_per_node": 8},
            (),
            {"cuda_ipc": BYTES / 30e9, "shared_memory": BYTES / 5e9, "disk": BYTES * 9 / 1e9},
        ),
        (
            MACHINES,
            (),
            {
                "cuda_ipc": BYTES / 30e9 + BYTES / 25e9,
                "shared_memory": BYTES / 5e9 + BYTES / 25e9,
                "disk": BYTES * 33 / 1e9 + BYTES / 25e9,
            },
        ),
        (
            MACHINES,
            ("actor.engine.shard_size=8", "rollout.weight_transport=disk"),
            {"disk": BYTES * 33 / 1e9, "cuda_ipc": BYTES / 30e9, "shared_memory": BYTES / 5e9},
        ),
        (
            {**MACHINES, "pools": {"generate": GENERATE}},
            ("actor.engine.shard_size=8",),
            {"nccl": BYTES / 25e9, "disk": BYTES * 17 / 1e9},
        ),
        (
            {"name": "ray", "gpus_per_node": 8, "pools": {"generate": {**GENERATE, "nodes": 1}}},
            (),
            {"nccl": BYTES / 30e9, "disk": BYTES * 9 / 1e9},
        ),
    ],
)
def test_seconds_of_a_weight_update_by_each_way(
    path: Path,
    runtime: dict[str, Any],
    overrides: tuple[str, ...],
    seconds: dict[str, float] | None,
) -> None:
    update = weight_update(*planned(path, *overrides, runtime=runtime))
    if seconds is None:
        assert update is None
        return
    assert update is not None
    assert update.bytes == BYTES
    assert list(update.seconds) == list(seconds)
    assert update.seconds == pytest.approx(seconds)
    assert "GB/s" in str(update)


def test_an_adapter_alone_is_a_small_update(path: Path) -> None:
    lora = {**LORA, "lora": {**LORA["lora"], "sync": "adapter"}}  # type: ignore[dict-item]
    runtime = {"name": "ray", "gpus_per_node": 8}
    rollout = {"name": "vllm", "n": 2, "max_adapter_rank": 4}
    update = weight_update(*planned(path, runtime=runtime, rollout=rollout, actor={"engine": lora}))
    assert update is not None
    assert update.bytes == 2 * ADAPTERS
