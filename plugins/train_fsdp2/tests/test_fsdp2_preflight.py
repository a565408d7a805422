"""The preflight rules: configs that the engine would refuse at its start are found without weights."""

import sys

import pytest
from transformers import Qwen2Config

from dovetail_sdk.testing import findings_of
from dovetail_train_fsdp2.preflight import fsdp2_model, shards_span_machines

KL = "algorithm.kl.in_loss={coef: 0.1}"
TWO = "runtime={name: ray, workers_per_node: 2}"


@pytest.fixture
def findings(tiny):
    def judge(*overrides):
        return findings_of(fsdp2_model, *overrides, sections={"model": {"path": str(tiny)}})

    return judge


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("actor.engine.lora={rank: 4}", "algorithm.advantage=gae"),
        ("actor.engine.lora={rank: 4, base: nf4}",),
        (TWO, "actor.engine.sequence_parallel_size=2"),
        ("model.attn_implementation=eager", KL),
        # Errors that other rules report, or that may not occur on another machine.
        ("actor.engine.lora={rank: 4, target_modules: [nothing]}",),
        ("model.path=/not/there",),
        ("actor.engine.freeze_vision=true", "model.path=Qwen/Qwen3-0.6B"),
    ],
)
def test_what_can_be_built_is_not_spoken_of(findings, overrides):
    assert findings(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("actor.engine.freeze_vision=true",), "actor.engine: freeze_vision"),
        ((KL, "ref.engine={name: fsdp2, freeze_vision: true}"), "ref.engine: freeze_vision"),
        (("actor.engine.liger=true", "runtime={name: inline, device: cpu}"), "CUDA"),
        ((TWO, "actor.engine.liger=true"), "CUDA"),
        (
            ("runtime={name: ray, workers_per_node: 3}", "actor.engine.sequence_parallel_size=3"),
            "sequence_parallel_size=3",
        ),
        (("model.attn_implementation=quick",), "quick"),
    ],
)
def test_what_the_engine_would_refuse_is_an_error(findings, overrides, words):
    (finding,) = findings(*overrides)
    assert finding.severity == "error"
    assert words in finding.message


def test_a_package_that_is_not_here_may_be_where_ray_runs(findings, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    lora = "actor.engine.lora={rank: 4}"
    assert [f.severity for f in findings(lora)] == ["error"]
    assert [f.severity for f in findings(lora, TWO)] == ["warning"]


MACHINES = "runtime={name: ray, nodes: 4, gpus_per_node: 8, address: auto}"


@pytest.mark.parametrize(
    ("overrides", "hidden", "found"),
    [
        ((MACHINES,), 2048, True),
        ((MACHINES, "actor.engine.shard_size=8"), 2048, False),
        ((MACHINES, "actor.engine.shard_size=32"), 2048, False),
        ((MACHINES, "actor.engine.lora={rank: 4}"), 2048, False),
        (("runtime={name: ray, gpus_per_node: 8}",), 2048, False),
        (("runtime={name: ray, nodes: 4, workers_per_node: 8, address: auto}",), 2048, False),
        # 67 GB of states for each accelerator.
        ((MACHINES,), 32768, False),
        ((MACHINES, "model.path=/not/there"), 2048, False),
    ],
)
def test_shards_over_more_machines_than_they_need_get_a_proposal(
    tmp_path, overrides, hidden, found
):
    Qwen2Config(
        vocab_size=500_000,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    model = {"model": {"path": str(tmp_path)}}
    findings = findings_of(shards_span_machines, *overrides, sections=model)
    assert [finding.severity for finding in findings] == ["warning"] * found
    assert all("actor.engine.shard_size=8" in str(finding.hint) for finding in findings)
