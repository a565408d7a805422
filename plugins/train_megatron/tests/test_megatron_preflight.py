"""The rule `megatron_layout`, which reports models and layouts that the engine can't train, from the model's config alone."""

from __future__ import annotations

import json
import shutil

import pytest

from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail_sdk.testing import findings_of
from dovetail_train_megatron.layouts import check_architecture, read_config
from dovetail_train_megatron.preflight import megatron_layout


@pytest.fixture
def found(tiny):
    """What the rule says of a config: severity, message and hint of each finding."""
    pytest.importorskip("dovetail_runtime_ray", reason="needs dovetail-runtime-ray")

    def judge(engine, runtime=None, **sections):
        raw = {
            "model": {"path": str(tiny)},
            "rollout": "hf",
            "actor": {"engine": {"name": "megatron", **engine}},
            "runtime": runtime or {"name": "ray", "gpus_per_node": 8},
            **sections,
        }
        found = findings_of(megatron_layout, sections=raw)
        return [(f.severity, f.message, f.hint) for f in found]

    return judge


def test_a_layout_that_divides_the_model_is_not_spoken_of(found):
    assert found({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}) == []


def test_one_that_does_not_is_one_error_that_names_only_sizes_which_divide_everything(found):
    # The reference has the actor's model and layout; 4 divides the query heads, but not the key and value heads.
    kl = {"kl": {"in_loss": {"estimator": "k3", "coef": 0.1}}}
    [(severity, message, hint)] = found({"tensor_parallel_size": 8}, algorithm=kl)
    assert severity == "error"
    assert message.startswith("actor.engine: tensor_parallel_size=8 does not divide")
    assert hint == "use one of 1, 2"


def test_two_layouts_in_one_pool_are_refused_and_in_two_pools_are_not(found):
    both = {
        "critic": {"engine": {"name": "megatron", "pipeline_parallel_size": 2}},
        "algorithm": {"advantage": "gae"},
    }
    [(severity, message, _)] = found({}, **both)
    assert severity == "error"
    assert "critic.engine.pipeline_parallel_size = 2, but actor.engine" in message
    pools = {
        "train": {"roles": ["actor", "rollout"], "gpus_per_node": 4},
        "value": {"roles": "critic", "gpus_per_node": 4},
    }
    assert found({}, runtime={"name": "ray", "pools": pools}, **both) == []


def test_a_pool_of_cpus_is_an_error_and_a_machine_without_a_gpu_a_warning(found):
    [(severity, message, hint)] = found({}, {"name": "ray", "workers_per_node": 2})
    assert severity == "error"
    assert "2 CPU processes" in message
    assert "actor.engine.name=fsdp2" in hint
    here = found({}, {"name": "inline", "device": "cpu"})
    assert [severity for severity, *_ in here] == ["warning"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "olmo2"}, "the architecture 'olmo2'.*nearest: 'llama'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "windows of 64 tokens"),
    ],
)
def test_a_model_that_would_be_another_one_in_megatron_is_refused(tiny, tmp_path, config, said):
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    section = ModelSection(path=str(tmp_path / "model"))
    with pytest.raises(ModelError, match=said):
        check_architecture(read_config(section), section)
