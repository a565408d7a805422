"""The memory of a plan's models, computed by hand: parameters of a tiny model, and bytes for each purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from dovetail.config import config_from_mapping
from dovetail.errors import ModelError
from dovetail.planning import Plan, adapters_of, make_plan
from dovetail_console.memory import estimate_memory, most_checkpoints

VOCABULARY, HIDDEN, INNER, LAYERS = 40, 16, 32, 3
BIASES = HIDDEN + 2 * 8
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 8
LAYER = ATTENTION + BIASES + 3 * HIDDEN * INNER + 2 * HIDDEN
MATRICES = LAYERS * (ATTENTION + 3 * HIDDEN * INNER)
EMBEDDING = VOCABULARY * HIDDEN
BASE = 2 * EMBEDDING + LAYERS * LAYER + HIDDEN
"""Two heads of eight features, one of keys and values, and an output layer of its own."""
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


def planned(path: Path, *overrides: str, **sections: Any) -> Plan:
    mapping = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "data": {"train_batch_size": 4, "max_prompt_length": 6, "max_response_length": 4},
        "rollout": {"n": 2},
        **sections,
    }
    return make_plan(config_from_mapping(mapping, overrides).config)


def memory(path: Path, *overrides: str, **sections: Any) -> dict[str, int]:
    """The memory that is held in the update, without working memory."""
    found = estimate_memory(planned(path, *overrides, **sections)).phases["update of actor"]
    working = ("actor activations", "actor weights, gathered", "actor buffers")
    return {
        what: size
        for what, size in found.items()
        if what not in (*working, "actor gradients of other ranks")
    }


KV = 2 * 2 * LAYERS * 8 * 10 * 8


def test_a_whole_model_is_trained_in_float32(path: Path) -> None:
    assert memory(path) == {
        "actor weights": 4 * BASE,
        "actor gradients": 4 * BASE,
        "actor optimizer": 8 * BASE,
        "rollout weights": 2 * BASE,
        "kv cache, at most": KV,
    }


def phases(path: Path, *overrides: str, card: int | None = None, **sections: Any) -> dict[str, int]:
    """The bytes in each phase of a step."""
    found = estimate_memory(planned(path, *overrides, **sections), card=card)
    return {phase: sum(parts.values()) for phase, parts in found.phases.items()}


def test_what_takes_turns_is_a_maximum_and_no_sum(path: Path) -> None:
    vllm = "rollout={name: vllm, n: 2}"
    beside, turns = (
        phases(path, vllm),
        phases(path, vllm, "rollout.offload=true", "actor.offload=true"),
    )
    assert beside["generation"] == 12 * BASE + 2 * BASE + KV  # gradients exist only in the update
    assert turns["generation"] == 2 * BASE + KV
    assert turns["update of actor"] == beside["update of actor"] - 2 * BASE - KV
    update = estimate_memory(planned(path, vllm)).phases["update of actor"]
    assert update["actor activations"] > 0
    assert beside["update of actor"] == sum(update.values())


def test_models_that_take_turns_are_not_added_up(path: Path) -> None:
    kl = "algorithm.kl.in_loss={coef: 0.1}"
    beside, turns = phases(path, kl), phases(path, kl, "ref.offload=true")
    assert beside["update of actor"] - turns["update of actor"] == 4 * BASE
    assert beside["scores of ref"] == turns["scores of ref"]


def test_an_engine_that_takes_a_share_of_the_accelerator_has_it_whatever_it_needs(
    path: Path,
) -> None:
    sglang = "rollout={name: sglang, n: 2, gpu_memory_utilization: 0.25}"
    assert phases(path, sglang, card=2**30)["generation"] == 12 * BASE + 2**28


def test_an_engine_with_a_bounded_cache_takes_what_samples_fill_or_its_share(path: Path) -> None:
    vllm = "rollout={name: vllm, n: 2, gpu_memory_utilization: 0.25}"
    needed = 2 * BASE + KV
    assert phases(path, vllm, card=4 * needed + 8)["generation"] == 12 * BASE + needed
    assert phases(path, vllm, card=4 * needed - 8)["generation"] == 12 * BASE + needed - 2
    sized = "rollout.engine_args={kv_cache_memory_bytes: 1000}"
    assert phases(path, vllm, sized, card=2**30)["generation"] == 12 * BASE + 2**28


def test_engines_that_share_an_accelerator_have_weights_and_a_share_each(path: Path) -> None:
    two = "rollout={name: vllm, n: 2, replicas: 2, gpu_memory_utilization: 0.25}"
    assert phases(path, two)["generation"] == 12 * BASE + 2 * 2 * BASE + KV
    few = 4 * BASE + KV
    assert phases(path, two, card=few)["generation"] == 12 * BASE + few // 2


def test_samples_that_are_generated_ahead_have_keys_and_values_too(path: Path) -> None:
    ahead = memory(
        path, "trainer={name: streaming, max_staleness: 2}", "rollout={name: vllm, n: 2}"
    )
    assert ahead["kv cache, at most"] == 3 * KV


def test_an_engine_says_what_it_takes_while_it_computes(path: Path) -> None:
    # Four prompts, once each, and two responses to each; the inputs of all layers, with two bytes a number.
    inputs = 4 * (6 + 2 * 4) * LAYERS * HIDDEN * 2
    found = estimate_memory(planned(path))
    phase, parts = "update of actor", found.phases["update of actor"]
    again = {"name": "fsdp2", "gradient_checkpointing": True}
    fewer = estimate_memory(planned(path, actor={"engine": again}))
    assert parts["actor activations"] > fewer.phases[phase]["actor activations"] == inputs
    assert found.least(phase) == fewer.least(phase) == fewer.peak
    assert parts["actor weights, gathered"] == 2 * BASE


def test_adapters_alone_have_gradients_and_moments(path: Path) -> None:
    found = memory(path, actor={"engine": LORA})
    del found["rollout weights"], found["kv cache, at most"]
    assert found == {
        "actor weights, frozen": 2 * BASE,
        "actor adapters": 4 * ADAPTERS,
        "actor gradients": 4 * ADAPTERS,
        "actor optimizer": 8 * ADAPTERS,
    }


def test_magnitudes_are_trained_too(path: Path) -> None:
    dora = {"name": "fsdp2", "lora": {**LORA["lora"], "dora": True}}
    found = memory(path, actor={"engine": dora})
    assert found["actor adapters"] == 4 * (ADAPTERS + LAYERS * (HIDDEN + 8))


def test_a_base_of_4_bits_is_whole_on_every_rank_and_takes_little(path: Path) -> None:
    qlora = {"name": "fsdp2", "lora": {**LORA["lora"], "base": "nf4"}}
    ray = ["runtime={name: ray, gpus_per_node: 4}", "rollout={name: vllm, n: 2}"]
    found = memory(path, actor={"engine": qlora})["actor weights, frozen"]
    divided = memory(path, *ray, actor={"engine": qlora})["actor weights, frozen"]
    assert found == pytest.approx(0.515869140625 * MATRICES + 2 * (BASE - MATRICES), abs=1)
    assert divided == pytest.approx(0.515869140625 * MATRICES + 2 * (BASE - MATRICES) / 4, abs=2)


@pytest.mark.parametrize(
    ("optim", "bytes_each"), [("adafactor", 0), ("adamw_8bit", 2.03125), ("{name: sgd, momentum: 0.9}", 4)]
)  # fmt: skip
def test_the_optimizer_says_what_it_keeps(path: Path, optim: str, bytes_each: float) -> None:
    found = memory(path, f"actor.optim={optim}")
    assert found.get("actor optimizer", 0) == pytest.approx(bytes_each * BASE, abs=1)


def test_muon_keeps_one_average_of_matrices_and_two_of_the_rest(path: Path) -> None:
    found = memory(path, "actor.optim=muon")["actor optimizer"]
    assert found == 4 * MATRICES + 8 * (BASE - MATRICES)


def test_what_is_stored_wider_stays_wide(tmp_path: Path) -> None:
    written(tmp_path, "float32")
    assert memory(tmp_path, actor={"engine": LORA})["actor weights, frozen"] == 4 * BASE


def test_a_critic_has_no_output_layer_and_a_model_of_its_own(path: Path, tmp_path: Path) -> None:
    written(tmp_path, "bfloat16", num_hidden_layers=1)
    given = ("algorithm.advantage=gae", f"critic.path={tmp_path}")
    found = estimate_memory(planned(path, *given)).phases["update of critic"]
    assert found["critic weights"] == 4 * (BASE - EMBEDDING - (LAYERS - 1) * LAYER)


def test_gradient_descent_keeps_no_moments(path: Path) -> None:
    assert "actor optimizer" not in memory(path, "actor.optim=sgd")


def test_a_model_of_32b_on_4_nodes_of_8_sharded_within_a_node(tmp_path: Path) -> None:
    """Qwen2.5-32B's shape by hand: states over the 8 accelerators of a node, the rollout's weights over 4."""
    hidden, inner, layers, vocabulary = 5120, 27648, 64, 152064
    keys = 8 * 128
    layer = 2 * hidden * hidden + 2 * hidden * keys + hidden + 2 * keys + 3 * hidden * inner
    parameters = 2 * vocabulary * hidden + layers * (layer + 2 * hidden) + hidden
    assert parameters == 32_763_876_352
    sizes = {"num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": layers}
    sizes |= {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner}
    written(tmp_path, "bfloat16", **sizes)
    plan = planned(
        tmp_path,
        "runtime={name: ray, nodes: 4, gpus_per_node: 8}",
        "actor.engine={name: fsdp2, shard_size: 8}",
        "rollout={name: vllm, n: 2, tensor_parallel_size: 4}",
    )
    memory = estimate_memory(plan)
    found = {what: size for held in memory.phases.values() for what, size in held.items()}
    assert found["actor weights"] == found["actor gradients"] == parameters * 4 // 8
    assert found["actor optimizer"] == parameters * 8 // 8
    assert found["rollout weights"] == parameters * 2 // 4
    (pool,) = plan.placement.pools
    assert plan.models[0].mesh.size == 32
    assert set(pool.roles) == {"actor", "rollout"}


def test_a_rank_holds_its_share(path: Path) -> None:
    ray = [
        "runtime={name: ray, gpus_per_node: 4}",
        "rollout={name: vllm, n: 2, tensor_parallel_size: 2}",
    ]
    found = memory(path, *ray, actor={"engine": LORA})
    assert found["actor adapters"] == 4 * ADAPTERS // 4
    assert found["actor weights, frozen"] == 2 * BASE // 4
    assert found["rollout weights"] == 2 * BASE // 2


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        (6, 2 * (6 + 2 * 4)),  # two prompts a rank, with both of their responses
        (4, 3 * (6 + 4)),  # eight responses over three ranks: three of them, to three prompts
    ],
)
def test_a_rank_has_whole_groups_where_their_number_allows_it(
    path: Path, prompts: int, tokens: int
) -> None:
    plan = planned(
        path,
        "runtime={name: ray, gpus_per_node: 3}",
        f"data.train_batch_size={prompts}",
        "actor.engine={name: fsdp2, gradient_checkpointing: true, share_prompts: always}",
    )
    parts = estimate_memory(plan).phases["update of actor"]
    assert parts["actor activations"] == tokens * LAYERS * HIDDEN * 2


def test_pools_apart_are_not_added_up(path: Path) -> None:
    pools = "runtime={name: ray, pools: {one: {roles: [actor], gpus_per_node: 1}, two: {roles: [rollout], gpus_per_node: 1}}}"
    assert {what.split()[0] for what in memory(path, pools)} == {"actor"}
    assert "generation" not in phases(path, pools)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            LORA["lora"],
            f"rank 4 on k_proj, q_proj ({2 * LAYERS} layers), {ADAPTERS:,} parameters",
        ),
        (
            {"rank": 2, "dora": True, "target_modules": ["lm_head"]},
            "rank 2 (DoRA) on lm_head (1 layer)",
        ),
    ],
)
def test_the_plan_tells_of_adapters(path: Path, lora: dict[str, Any], words: str) -> None:
    plan = planned(path, actor={"engine": {"name": "fsdp2", "lora": lora}})
    (adapter,) = adapters_of(plan)
    assert str(adapter).startswith(f"adapters of actor: {words}")
    assert str(adapter).endswith(f"% of the model's {BASE:,})")


def test_a_model_that_is_not_here_still_has_a_rank() -> None:
    plan = planned(Path("nowhere"), actor={"engine": LORA})
    (adapter,) = adapters_of(plan)
    assert str(adapter) == "adapters of actor: rank 4"
    with pytest.raises(ModelError, match="'nowhere' holds no model"):
        estimate_memory(plan)


def test_without_adapters_the_plan_tells_of_none(path: Path) -> None:
    assert list(adapters_of(planned(path, "algorithm.advantage=gae"))) == []


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ([], 1),  # only the last step's
        (["trainer.save_last=false"], 0),
        (["trainer.save_every=10"], 4),  # three kept, and one in writing
        (["trainer.save_every=10", "trainer.best_metric=val/mean@1"], 5),
        (["trainer.save_every=10", "trainer.keep_every=50"], 6),  # and steps 50 and 100
        (["trainer.save_every=10", "trainer.keep_every=15"], 7),  # and steps 30, 60 and 90
        (["trainer.save_every=60"], 2),  # steps 60 and 100
        (["trainer.save_every=10", "trainer.keep_checkpoints=null"], 10),
    ],
)
def test_the_plan_knows_how_many_checkpoints_are_on_the_disk_at_most(
    path: Path, overrides: list[str], most: int
) -> None:
    plan = planned(path, "trainer.total_steps=100", *overrides)
    assert most_checkpoints(plan) == most
    assert plan.checkpoint_bytes() == 3 * 4 * BASE  # weights and two moments
