"""Layouts: four ranks on two axes, the rank that returns results, and layouts and models that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from dovetail.errors import ConfigError, ModelError, PlanError, PluginNeedsError
from dovetail.interfaces import PluginContext
from dovetail.metrics import values
from dovetail.sections import ModelSection
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.engine import MegatronEngine
from dovetail_train_megatron.layouts import check_layout, read_config

TWO_AXES = {
    "tp2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2 x tp2": {"tensor_parallel_size": 2},
    "pp2 x cp2": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
    "dp2 x pp2": {"pipeline_parallel_size": 2},
    "tp2 x cp2": {"tensor_parallel_size": 2, "context_parallel_size": 2},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=() if name == "tp2 x pp2" else pytest.mark.nightly)
        for name, layout in TWO_AXES.items()
    ],
)
def test_two_axes_at_once_compute_what_plain_transformers_does(
    four, on_ranks, tiny, batch, objective, plain, tmp_path, layout
):
    engine = on_ranks(four, tiny, **layout)
    scores = engine.forward(batch, frozenset({"log_probs"})).result()["log_probs"]
    metrics = values(engine.update(batch, objective).result())
    engine.export(tmp_path / "out").result()
    loss, norm, expected, weights = plain(tiny, batch)
    np.testing.assert_allclose(scores.values, expected["log_probs"], atol=2e-5)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights.items():
        assert_close(exported[name], tensor, atol=5e-5, rtol=1e-4)


def groups_of_this_process(rank):
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def test_an_engine_that_is_closed_leaves_no_groups_behind(two, on_ranks, tiny):
    before = two.run(groups_of_this_process)
    on_ranks(two, tiny, tensor_parallel_size=2).close()
    after = two.run(groups_of_this_process)
    assert after == before


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4 .* 2 key"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 .* 4 attention heads"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 .* 2 layers"),
        ({"context_parallel_size": 8}, "context_parallel_size=8 .* 4 attention heads"),
        ({"expert_parallel_size": 2}, "expert_parallel_size=2 .* no experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_what_would(tiny, layout, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(read_config(ModelSection(path=str(tiny))), MegatronConfig(**layout))


def test_ranks_without_a_token_of_the_vocabulary_are_refused_with_what_would(tiny):
    hf = read_config(ModelSection(path=str(tiny)))
    hf.num_attention_heads = hf.num_key_value_heads = 4
    hf.vocab_size = 5
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* vocabulary of 5(?s:.)*1, 2$"):
        check_layout(hf, MegatronConfig(tensor_parallel_size=4))
    check_layout(hf, MegatronConfig(tensor_parallel_size=2))
    hf.vocab_size = 7
    check_layout(hf, MegatronConfig(tensor_parallel_size=4))


def test_a_layout_that_does_not_divide_the_ranks_is_refused_by_the_plan():
    config = MegatronConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert config.mesh_axes() == {"pp": 2, "cp": 1, "tp": 2}
    assert config.shards(8) == 4
    with pytest.raises(PlanError, match="6 ranks"):
        config.shards(6)
    with pytest.raises(PlanError, match="expert_parallel_size=3"):
        MegatronConfig(expert_parallel_size=3).shards(4)
    with pytest.raises(PlanError, match="can't be combined"):
        MegatronConfig(expert_parallel_size=2, pipeline_parallel_size=2).shards(4)


def test_without_cuda_the_engine_says_so_before_it_loads_anything(tiny):
    context = PluginContext(role="actor", model=ModelSection(path=str(tiny)), device="cpu")
    with pytest.raises(PluginNeedsError, match="needs a CUDA device"):
        MegatronEngine(MegatronConfig(), context).start()


def test_an_architecture_that_it_lacks_is_named_with_the_nearest(tmp_path):
    from cuda_stand_in import MegatronOnCpu
    from transformers import Qwen2MoeConfig

    pytest.importorskip("megatron.core", reason="needs megatron-core")
    pytest.importorskip("mbridge", reason="needs mbridge")
    Qwen2MoeConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    context = PluginContext(role="actor", model=ModelSection(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"the architecture 'qwen2_moe'.*nearest"):
        MegatronOnCpu(MegatronConfig(), context).start()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"model_type": "qwen2", "hidden_size": "big"}', "'hidden_size': .*expected int"),
        ('{"model_type": "qwen2",', "valid JSON"),
        ("{}", "model_type"),
    ],
)
def test_a_config_that_can_not_be_read_is_an_error_of_the_model(tmp_path, written, said):
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ModelError, match=f"can't be loaded: .*{said}"):
        read_config(ModelSection(path=str(tmp_path)))
