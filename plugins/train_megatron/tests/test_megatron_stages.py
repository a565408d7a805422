"""Division of layers among pipeline stages; every division computes the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from dovetail.errors import ConfigError
from dovetail.metrics import values
from dovetail.sections import ModelSection
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.layouts import check_layout, read_config
from dovetail_train_megatron.stages import check_last_stage, last_stage_layers, output_cost


@given(st.integers(2, 8), st.integers(1, 12), st.floats(0, 40))
def test_no_other_even_division_has_a_faster_slowest_stage(stages, a_stage, output):
    layers = stages * a_stage

    def slowest(last):
        return max((layers - last) / (stages - 1), last + output)

    last = last_stage_layers(layers, stages, output)
    possible = [n for n in range(1, layers) if not (layers - n) % (stages - 1)]
    assert last in possible
    assert slowest(last) == min(map(slowest, possible))


@pytest.mark.parametrize(("layers", "stages", "last"), [(30, 4, 6), (3, 2, 1), (5, 4, 2)])
def test_stages_need_not_divide_the_layers(layers, stages, last):
    assert last_stage_layers(layers, stages, 0.6) == last
    check_last_stage(last, layers, stages)


def test_more_stages_than_layers_are_refused_with_what_is_possible():
    for refused in (lambda: last_stage_layers(4, 8, 3.0), lambda: check_last_stage(1, 4, 8)):
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size=8 .* 4 layers.*\n.*at most 4"):  # fmt: skip
            refused()


def test_an_output_layer_that_costs_nothing_leaves_stages_equal():
    assert [last_stage_layers(24, stages, 0.0) for stages in (2, 3, 4, 8)] == [12, 8, 6, 3]


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    small = SimpleNamespace(
        hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936,
    )  # fmt: skip
    assert 0 < last_stage_layers(24, 2, output_cost(small, 64)) < 12


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of three layers, which two stages can't share evenly."""
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("deep"),
        vocab_size=301,
        hidden_size=32,
        intermediate_size=64,
        layers=3,
    )


def test_unequal_stages_compute_what_plain_transformers_does(
    two, on_ranks, deep, batch, objective, plain, tmp_path
):
    engine = on_ranks(two, deep, pipeline_parallel_size=2, last_stage_layers=1)
    metrics = values(engine.update(batch, objective).result())
    engine.export(tmp_path / "out").result()
    loss, norm, _, weights = plain(deep, batch)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(exported, weights, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("stages", "last", "why"),
    [
        (3, 2, r"1 of .* 3 layers .* 2 stages.*\n.* 1,"),
        (2, 3, r"0 of .* 3 layers .*\n.* 1, 2,"),
        (2, 5, "0 of .* 3 layers"),
    ],
)  # fmt: skip
def test_a_last_stage_that_the_others_can_not_divide_is_refused_with_what_would(deep, stages, last, why):  # fmt: skip
    config = MegatronConfig(pipeline_parallel_size=stages, last_stage_layers=last)
    with pytest.raises(ConfigError, match=f"last_stage_layers={last} .*{why}"):  # fmt: skip
        check_layout(read_config(ModelSection(path=str(deep))), config)
