"""What the engine would refuse when it starts is found before, without weights."""

import sys

import pytest

from dovetail_sdk.testing import findings_of
from dovetail_train_fsdp2.preflight import fsdp2_model

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
        # Named by other rules, or on another machine.
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
            "sequence_parallel_size 3",
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
