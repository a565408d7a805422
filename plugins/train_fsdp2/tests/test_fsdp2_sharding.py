"""Sharding in one process: the sharded units, groups of one rank, and tensors in the compute dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dovetail.dispatch import Mesh
from dovetail.errors import DispatchError, ModelError
from dovetail.interfaces import PluginContext
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_torch_engines import Ranks
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine
from dovetail_train_fsdp2.model import empty_model
from dovetail_train_fsdp2.sharding import blocks_of, join_alone
from dovetail_train_fsdp2.start import _sharded

SGD = {"name": "sgd", "lr": 0.5, "grad_clip": 0.5}


@pytest.fixture
def group_of_one():
    join_alone(torch.device("cpu"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(make_engine, monkeypatch, group_of_one):
    """Start an engine as on an accelerator: in shards, although it is alone."""

    def start(path, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(
                "dovetail_train_fsdp2.engine.load_runner",
                lambda config, context, ranks: _sharded(config, context, context.model, ranks),
            )
            return make_engine(path, **settings)

    return start


class Layers(nn.Module):
    _no_split_modules = None

    def __init__(self, *children):
        super().__init__()
        self.parts = nn.ModuleList(children)


def test_units_are_the_models_own_layers_or_the_longest_list_of_a_class(tiny, make_engine):
    model = make_engine(tiny)._runner.trunk
    assert blocks_of(model) == list(model.model.layers)
    assert blocks_of(model.base_model) == list(model.model.layers)
    model._no_split_modules = ["Elsewhere"]
    assert blocks_of(model) == list(model.model.layers)
    nested = Layers(nn.Linear(1, 1), nn.Linear(1, 1), Layers(nn.ReLU()))
    nested._no_split_modules = {"Layers"}
    assert blocks_of(nested) == [nested]


def test_a_model_without_layers_is_refused(tiny):
    with pytest.raises(ModelError, match=r"Layers .*_no_split_modules"):
        blocks_of(Layers(nn.Linear(1, 1), nn.ReLU()))
    named = Layers(nn.Linear(1, 1), nn.ReLU())
    named._no_split_modules = ["Block", "Attention"]
    with pytest.raises(ModelError, match="Attention, Block"):
        blocks_of(named)


def test_an_empty_model_has_real_buffers_and_no_weights(tiny, make_engine):
    model = empty_model(make_engine(tiny).context.model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    loaded = dict(make_engine(tiny)._runner.trunk.named_buffers())
    assert loaded
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, loaded[name])
    # New modules are on the meta device only during the call.
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4)])
def test_a_group_of_one_does_as_one_piece(tiny, make_engine, sharded, batch, objective, lora):
    settings = {"config": Fsdp2Config(lora=lora), "budget": 64, **SGD}
    one, other = make_engine(tiny, **settings), sharded(tiny, **settings)
    for _ in range(3):
        plain, shards = one.update(batch, objective), other.update(batch, objective)
        for name, metric in plain.items():
            assert shards[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-5), name
    scores = [e.forward(batch, frozenset({"log_probs"}))["log_probs"].values for e in (one, other)]
    np.testing.assert_allclose(*scores, atol=5e-6)


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("head", ["lm", "value"])
def test_an_objective_may_write_into_what_a_sharded_model_gives(
    tiny, make_engine, sharded, batch, head
):
    mask = batch["response_mask"]
    # All tokens are scored: otherwise outputs are copied together, and are never views.
    batch = batch.with_columns({"response_mask": mask.with_values(np.ones_like(mask.values))})
    section = PluginSection(path=str(Path(__file__).parent / "in_place.py"), attribute=head)
    goal = objective_spec(section)
    one, other = (make(tiny, head=head, **SGD) for make in (make_engine, sharded))
    for _ in range(2):
        plain, shards = one.update(batch, goal), other.update(batch, goal)
        for name, metric in plain.items():
            assert shards[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_architecture_allows_is_found_out_in_shards_too(tiny, make_engine, sharded, dtype):
    one, other = (make(tiny, dtype=dtype)._runner for make in (make_engine, sharded))
    assert one._plain_head is True
    assert other._plain_head is True
    assert one.packs.why_not is None
    assert other.packs.why_not is None


def test_half_a_backward_pass_is_forgotten(
    tiny, sharded, make_engine, batch, objective, monkeypatch
):
    expected = make_engine(tiny, **SGD).update(batch, objective)
    engine = sharded(tiny, budget=33, **SGD)
    backward, calls = engine._backward, []

    def fail_the_second_time(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        backward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_backward", fail_the_second_time)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.update(batch, objective)
    assert all(parameter.grad is None for parameter in engine._runner.parameters())
    metrics = engine.update(batch, objective)
    assert metrics["actor/grad_norm"].value == pytest.approx(
        expected["actor/grad_norm"].value, rel=1e-4
    )


def test_shards_that_have_moved_train_on(tiny, sharded, batch, objective):
    """As `offload` and `onload` move them, to memory of another device and back."""
    moved, stayed = (sharded(tiny, dtype="bfloat16", lr=1e-2) for _ in range(2))
    shards = list(moved._runner.parameters())
    for _ in range(3):
        assert moved.update(batch, objective) == stayed.update(batch, objective)
        places = [parameter.to_local().data_ptr() for parameter in shards]
        moved._runner._apply(torch.clone)
        states = [s for o in moved._optimizer._torch for s in o.state.values()]
        assert states
        for moments in states:
            moments.update({name: tensor.clone() for name, tensor in moments.items()})
        for parameter, place in zip(shards, places, strict=True):
            assert parameter.to_local().data_ptr() != place
        assert all(p is q for p, q in zip(shards, moved._runner.parameters(), strict=True))
        moved.forward(batch, frozenset({"log_probs"}))


def test_frozen_weights_stay_as_narrow_as_they_are_stored(sharded, batch, objective, tmp_path):
    path = tiny_model_and_tokenizer(tmp_path, vocab_size=300, hidden_size=32, dtype="bfloat16")
    config = Fsdp2Config(lora=LoraSection(rank=4, dora=True))
    engine = sharded(path, dtype="bfloat16", config=config, lr=1e-2)
    scored = frozenset({"log_probs", "ref_log_probs"})
    before = engine.forward(batch, scored)
    for _ in range(2):
        engine.update(batch, objective)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in engine._runner.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    after = engine.forward(batch, scored)
    np.testing.assert_array_equal(after["ref_log_probs"].values, before["ref_log_probs"].values)
    assert np.abs(after["log_probs"].values - before["log_probs"].values).max() > 1e-2


def test_a_mesh_needs_its_processes(tiny):
    with pytest.raises(DispatchError, match=r"2 ranks, .* group has 1"):
        Ranks(Mesh(dp=2), 0)
    engine = Fsdp2Engine(Fsdp2Config(), PluginContext(mesh=Mesh(dp=2), role="actor"))
    with pytest.raises(DispatchError, match="one process group"):
        engine.start()
