"""Training states in any layout and of the engine `fsdp2`, weights sent to a rollout, and errors on all ranks."""

from __future__ import annotations

import json
import shutil
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_engines import exported
from training_states import critic_norm

from dovetail.errors import CheckpointError, ModelError, NumericsError
from dovetail.interfaces import PluginContext, PluginRef, WeightManifest
from dovetail.metrics import values
from dovetail.sections import ModelSection
from dovetail_rollouts.transports.config import DiskTransportConfig
from dovetail_rollouts.transports.disk import DiskTransport
from dovetail_torch_engines import LoraSection
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.engine import MegatronEngine

TP, PP, CP = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "context"))


assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        {"temperature": 0.6},
        {"do_sample": False, "top_p": 0.95, "top_k": 20},
        {"length_penalty": 0.8},
        {"do_sample": True, "temperature": 0.6},
    ],
)
def test_the_flags_of_generation_are_exported_as_they_are(two, on_ranks, tiny, tmp_path, flags):
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(flags))
    exported(on_ranks(two, model), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == flags


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (TP, PP),
        pytest.param(PP, CP, marks=pytest.mark.nightly),
        pytest.param(CP, {}, marks=pytest.mark.nightly),
        pytest.param({}, TP, marks=pytest.mark.nightly),
    ],
)
def test_a_state_is_continued_in_another_layout(
    two, on_ranks, tiny, batch, objective, tmp_path, first, then
):
    engine = on_ranks(two, tiny, **first)
    engine.update(batch, objective).result()
    engine.save(tmp_path / "state").result()
    engine.update(batch, objective).result()
    expected = exported(engine, tmp_path / "one")
    engine.close()
    other = on_ranks(two, tiny, **then)
    other.load(tmp_path / "state").result()
    other.update(batch, objective).result()
    assert_close(exported(other, tmp_path / "two"), expected)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(TP, id="tp2"), pytest.param(PP, id="pp2", marks=pytest.mark.nightly)],
)
def test_the_engine_fsdp2_continues_what_this_one_began_and_the_other_way_round(
    two, on_ranks, other_engine, tiny, batch, objective, tmp_path, layout
):
    megatron, fsdp2 = on_ranks(two, tiny, **layout), other_engine(tiny)
    for engine in (megatron, fsdp2):
        engine.update(batch, objective).result()
    megatron.save(tmp_path / "of-megatron").result()
    fsdp2.save(tmp_path / "of-fsdp2").result()
    megatron.load(tmp_path / "of-fsdp2").result()
    fsdp2.load(tmp_path / "of-megatron").result()
    for engine in (megatron, fsdp2):
        engine.update(batch, objective).result()
    assert_close(exported(megatron, tmp_path / "a"), exported(fsdp2, tmp_path / "b"))


def test_a_state_of_another_model_is_refused_on_all_ranks(
    two, on_ranks, tiny, batch, objective, tmp_path
):
    engine = on_ranks(two, tiny, **TP)
    engine.update(batch, objective).result()
    engine.save(tmp_path).result()
    before = exported(engine, tmp_path / "before")
    (file, *_) = sorted((tmp_path / "weights").glob("*.safetensors"))
    file.unlink()
    with pytest.raises(CheckpointError):
        engine.load(tmp_path).result()
    assert_close(exported(engine, tmp_path / "after"), before)


@pytest.mark.parametrize("layout", [TP, PP], ids=["tp2", "pp2"])
def test_weights_reach_a_rollout_under_hugging_faces_names(
    two, on_ranks, tiny, batch, objective, tmp_path, layout
):
    # Rank 1 sends: with a sender on each machine, every rank receives every tensor.
    (tmp_path / "swapped.py").write_text(
        "import attrs\n"
        "from dovetail_rollouts.transports.disk import DiskTransport\n\n\n"
        "class Swapped(DiskTransport):\n"
        "    def sender(self):\n"
        "        self.context = attrs.evolve(self.context, rank=1 - self.context.rank)\n"
        "        return super().sender()\n"
    )
    directory = DiskTransportConfig(name="disk", directory=str(tmp_path / "weights"))
    transport = PluginRef(
        kind="weight_transport",
        name="Swapped",
        path=str(tmp_path / "swapped.py"),
        attribute="Swapped",
        config=directory,
    )
    engine = on_ranks(two, tiny, transport=transport, **layout)
    engine.update(batch, objective).result()
    expected = exported(engine, tmp_path / "out")
    manifest: WeightManifest = engine.weight_manifest(1).result()
    manifest = attrs.evolve(manifest, receivers_on={"this": 1})
    engine.send_weights(1, manifest).result()
    receiver = DiskTransport(directory, PluginContext()).receiver()
    assert_close(dict(receiver.receive(manifest)), expected)
    assert {s.name: s.shape for s in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    wrong = attrs.evolve(
        manifest, tensors=(attrs.evolve(manifest.tensors[0], name="no.such.weight"),)
    )
    with pytest.raises(Exception, match=r"no\.such\.weight"):
        engine.send_weights(1, wrong).result()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP, id="tp2", marks=pytest.mark.nightly),
        pytest.param(PP, id="pp2"),
        pytest.param(CP, id="cp2", marks=pytest.mark.nightly),
    ],
)
def test_what_is_not_finite_stops_the_update_on_all_ranks_and_names_the_sample(
    two, on_ranks, tiny, batch, objective, tmp_path, layout
):
    engine = on_ranks(two, tiny, **layout)
    engine.update(batch, objective).result()
    before = exported(engine, tmp_path / "before")
    huge = batch["advantages"].copy()
    huge[3] = 3e38
    spoilt = batch.with_columns({"advantages": huge})
    with pytest.raises(NumericsError) as caught:
        engine.update(spoilt, objective).result()
    assert caught.value.sample_ids == ("s3",)
    after = exported(engine, tmp_path / "after")
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def test_plain_descent_steps_along_the_gradient(
    two, on_ranks, tiny, batch, objective, plain, tmp_path
):
    engine = on_ranks(two, tiny, optim={"name": "sgd", "lr": 0.5, "weight_decay": 0.0}, **TP)
    norm = values(engine.update(batch, objective).result())["actor/grad_norm"]
    start = load_file(tiny / "model.safetensors")
    step = exported(engine, tmp_path / "out")
    length = sum(float((step[n] - start[n]).square().sum()) for n in step) ** 0.5
    assert length == pytest.approx(0.5 * min(1.0, norm), rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP, id="tp2"),
        pytest.param({**TP, "sequence_parallel": False}, id="tp2 plain", marks=pytest.mark.nightly),
        pytest.param(PP, id="pp2", marks=pytest.mark.nightly),
        pytest.param(CP, id="cp2", marks=pytest.mark.nightly),
    ],
)
def test_a_critic_is_the_same_in_any_layout(two, on_ranks, tiny, batch, tmp_path, layout):
    found = []
    for config in ({}, layout):
        critic = on_ranks(two, tiny, head="value", **config)
        norm = critic_norm(critic, batch)
        after = critic.forward(batch, frozenset({"values"})).result()["values"].values
        found.append((norm, after))
        critic.close()
    (norm, expected), (got_norm, got) = found
    assert np.abs(expected).max() > 0
    assert got_norm == pytest.approx(norm, rel=1e-3)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_critics_head_is_the_checkpoints_and_of_another_form_is_refused(
    two, on_ranks, tiny, batch, tmp_path
):
    weights = load_file(tiny / "model.safetensors")
    model = shutil.copytree(tiny, tmp_path / "model")
    head = torch.ones(1, weights["model.norm.weight"].shape[0])
    for name, refused in (("score.weight", False), ("v_head.0.weight", True)):
        stored = {**weights, name: head}
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(ModelError, match=rf"'{name}'"):
                on_ranks(two, model, head="value")
        else:
            critic = on_ranks(two, model, head="value")
            found = critic.forward(batch, frozenset({"values"})).result()["values"].values
            assert np.abs(found).max() > 0
            critic.close()


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4)], ids=["full", "lora"])
def test_the_engine_fsdp2_exports_the_same_model_from_a_saved_state(
    two, tiny, batch, objective, on_ranks, tmp_path, lora
):
    """In one process without a GPU, whatever the layout."""
    pytest.importorskip("dovetail_train_fsdp2", reason="needs dovetail-train-fsdp2")
    from dovetail_train_fsdp2.config import Fsdp2Config
    from dovetail_train_fsdp2.engine import Fsdp2Engine

    engine = on_ranks(two, tiny, lora=lora, **TP)
    engine.update(batch, objective).result()
    engine.save(tmp_path / "state").result()
    ours = exported(engine, tmp_path / "ours")
    context = PluginContext(model=ModelSection(path=str(tiny), dtype="float32"))
    other = Fsdp2Engine(Fsdp2Config(name="fsdp2", lora=lora), context)
    other.export_saved(tmp_path / "state", tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0)
    base = load_file(tiny / "model.safetensors")
    assert any(not torch.equal(theirs[name], tensor) for name, tensor in base.items())


def test_an_adapter_comes_out_alone_and_is_trained_further(
    two, tiny, batch, objective, on_ranks, tmp_path
):
    """In peft's form, from and to ranks that divide it."""
    engine = on_ranks(two, tiny, lora=LoraSection(rank=4), **TP)
    engine.update(batch, objective).result()
    engine.save(tmp_path / "state").result()
    ours = exported(engine, tmp_path / "ours")
    config = MegatronConfig(name="megatron", lora=LoraSection(rank=4))
    context = PluginContext(model=ModelSection(path=str(tiny), dtype="float32"))
    MegatronEngine(config, context).export_adapter(tmp_path / "state", tmp_path / "adapter")
    lora = LoraSection(rank=4, adapter_path=str(tmp_path / "adapter"))
    again = exported(on_ranks(two, tiny, lora=lora, **TP), tmp_path / "again")
    torch.testing.assert_close(again, ours, atol=1e-6, rtol=0)
