"""Loading and sending of weights by ranks in real processes, each with a part of the model."""

import json

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dovetail.dispatch import Mesh
from dovetail.errors import ModelError, WeightSyncError
from dovetail.interfaces import AdapterSpec, PluginContext, PluginRef, WeightSender, WeightTransport
from dovetail.plugins import make_plugin
from dovetail_rollouts.transports.config import DiskTransportConfig
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2 import shards
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection

LORA = LoraSection(rank=4)
SCORES = frozenset({"log_probs", "entropies"})


class Broken(WeightTransport, WeightSender):
    """A transport that loses its rollout after one tensor."""

    name = "broken"
    api = ">=1.0,<2"

    def sender(self):
        return self

    def receiver(self):
        raise NotImplementedError

    def send(self, manifest, tensors):
        next(iter(tensors))
        if self.context.rank == 0:
            raise WeightSyncError("the rollout has gone")


def disk(directory):
    config = DiskTransportConfig(name="disk", directory=str(directory))
    return PluginRef(kind="weight_transport", name="disk", config=config)


# Weights on the wire


def sent(group, directory, version=1):
    """What a rollout receives."""
    manifest = group.weight_manifest(version).result()
    group.send_weights(version, manifest).result()
    transport = make_plugin(disk(directory), PluginContext())
    return manifest, dict(transport.receiver().receive(manifest))


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        ("bfloat16", None),
        ("float32", LORA),
        ("bfloat16", LORA),
        ("float32", LoraSection(rank=4, dora=True)),
    ],
)
def test_two_ranks_send_what_one_sends(two, tiny, on_ranks, make_engine, tmp_path, dtype, lora):
    group = on_ranks(two, tiny, dtype=dtype, lora=lora, transport=disk(tmp_path))
    manifest, weights = sent(group, tmp_path)
    alone = make_engine(tiny, dtype=dtype, seed=3, config=Fsdp2Config(lora=lora))
    assert manifest == alone.weight_manifest(1)
    found = load_file(tiny / "model.safetensors")
    assert weights.keys() == found.keys()
    for name, weight in found.items():
        # DoRA divides and multiplies by the same norm, which adds rounding errors.
        tolerance = 0.01 if lora and lora.dora else 0
        torch.testing.assert_close(
            weights[name], weight.to(getattr(torch, dtype)), rtol=tolerance, atol=0
        )


@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("rows", [300, 301])
def test_copies_of_the_shards_send_once(
    four, on_ranks, batch, objective, tmp_path, shard_size, rows
):
    tiny = tiny_model_and_tokenizer(
        tmp_path / "model", vocab_size=rows, hidden_size=32, intermediate_size=rows - 250
    )
    group = on_ranks(four, tiny, shard_size=shard_size, transport=disk(tmp_path))
    group.forward(batch, SCORES).result()
    group.update(batch, objective).result()
    _, weights = sent(group, tmp_path)
    group.export(tmp_path / "export").result()
    exported = load_file(tmp_path / "export" / "model.safetensors")
    torch.testing.assert_close(weights, exported, rtol=0, atol=0)


def test_blocks_keep_the_order_and_cast_what_floats(monkeypatch):
    monkeypatch.setattr(shards, "BLOCK_BYTES", 40)
    given = {f"{n}": torch.arange(float(n)) for n in (3, 9, 1, 30, 2, 2)} | {
        "whole": torch.ones(4, dtype=torch.int64)
    }
    cast = lambda t: torch.bfloat16 if t.is_floating_point() else t.dtype  # noqa: E731
    found = list(shards.wholes(given.items(), torch.device("cpu"), cast))
    assert [name for name, _ in found] == list(given)
    for name, tensor in found:
        assert torch.equal(tensor, given[name].to(cast(given[name])))


def test_a_block_of_many_tensors_is_one_collective():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        given = {
            f"{n}": DTensor.from_local(torch.ones(2, n), mesh, [Shard(0)]) for n in range(1, 6)
        }
        with CommDebugMode() as seen:
            found = dict(shards.wholes(given.items(), torch.device("cpu"), lambda t: t.dtype))
        assert {name: tuple(t.shape) for name, t in found.items()} == {
            f"{n}": (4, n) for n in range(1, 6)
        }
        assert seen.get_total_counts() == 1
    finally:
        torch.distributed.destroy_process_group()


def test_the_adapter_alone_travels_under_pefts_names(
    two, tiny, on_ranks, batch, objective, tmp_path
):
    from peft import LoraConfig, get_peft_model
    from peft.utils import set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    section = LoraSection(rank=4, dora=True, sync="adapter")
    group = on_ranks(two, tiny, lora=section, transport=disk(tmp_path), optim={"lr": 1e-2})
    group.update(batch, objective).result()
    manifest, matrices = sent(group, tmp_path)
    assert manifest.kind == "adapter"
    # The adapter is built from the manifest alone, since a rollout does not know this engine's config.
    spec = AdapterSpec(**json.loads(json.dumps(attrs.asdict(manifest.adapter))))
    assert set(spec.target_modules) > {"q_proj", "down_proj"}
    assert "lm_head" not in spec.target_modules
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.target_modules),
        use_dora=spec.dora,
        use_rslora=spec.rank_stabilised,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), config)
    outcome = set_peft_model_state_dict(model, matrices)
    assert not outcome.unexpected_keys
    merged = model.merge_and_unload().state_dict()
    group.export(tmp_path / "export").result()
    expected = load_file(tmp_path / "export" / "model.safetensors")
    assert any(
        (w - expected[n]).abs().max() > 1e-4
        for n, w in load_file(tiny / "model.safetensors").items()
    )
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_a_sender_that_fails_keeps_no_rank_waiting(two, tiny, on_ranks, batch):
    broken = PluginRef(kind="weight_transport", name="broken", path=__file__, attribute="Broken")
    group = on_ranks(two, tiny, transport=broken)
    with pytest.raises(WeightSyncError, match="rollout has gone"):
        group.send_weights(1, group.weight_manifest(1).result()).result()
    assert len(group.forward(batch, SCORES).result()) == len(batch)
    other = on_ranks(two, tiny)
    with pytest.raises(WeightSyncError, match="no weight transport"):
        other.send_weights(1, other.weight_manifest(1).result()).result()


# Loading


def assert_loads_as_in_one_piece(on_ranks, ranks, make_engine, path, batch, tmp_path, **settings):
    group = on_ranks(ranks, path, transport=disk(tmp_path), **settings)
    alone = make_engine(path)
    found, expected = group.forward(batch, SCORES).result(), alone.forward(batch, SCORES)
    for name in SCORES:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=1e-5)
    manifest, weights = sent(group, tmp_path)
    assert manifest == alone.weight_manifest(1)
    return weights


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen3", True)])
def test_each_rank_reads_its_rows(two, on_ranks, make_engine, batch, tmp_path, architecture, tied):
    path = tiny_model_and_tokenizer(
        tmp_path / "model", vocab_size=300, architecture=architecture, tie_word_embeddings=tied
    )
    weights = assert_loads_as_in_one_piece(on_ranks, two, make_engine, path, batch, tmp_path)
    torch.testing.assert_close(weights, load_file(path / "model.safetensors"), rtol=0, atol=0)


def test_no_rank_reads_the_whole(two, tiny, on_ranks):
    on_ranks(two, tiny)
    for read, whole in two.run(rows_read, str(tiny)):
        assert 0.4 * whole < read < 0.6 * whole


def rows_read(rank, path):
    """Elements that this rank reads of a checkpoint's tensors, and how many there are."""
    from dovetail.interfaces import PluginContext
    from dovetail.sections import ModelSection
    from dovetail_torch_engines import StoredCheckpoint
    from dovetail_train_fsdp2.engine import Fsdp2Engine

    read = []
    plain = StoredCheckpoint.rows
    context = PluginContext(
        role="actor",
        mesh=Mesh(dp=rank.world),
        rank=rank.rank,
        model=ModelSection(path=path, dtype="float32"),
    )
    engine = Fsdp2Engine(Fsdp2Config(), context)
    StoredCheckpoint.rows = lambda *args: read.append(plain(*args)) or read[-1]
    try:
        engine.start()
    finally:
        StoredCheckpoint.rows = plain
    whole = sum(parameter.numel() for parameter in engine._runner.parameters())
    engine.close()
    return sum(tensor.numel() for tensor in read), whole


def test_what_is_stored_in_another_form_is_given_out_by_rank_0(
    two, on_ranks, make_engine, batch, tmp_path
):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    path = tmp_path / "moe"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    weights = assert_loads_as_in_one_piece(on_ranks, two, make_engine, path, batch, tmp_path)
    found = load_file(path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in found
    torch.testing.assert_close(weights, found, rtol=0, atol=0)


def test_pickled_checkpoints_are_given_out_by_rank_0(
    two, tiny, on_ranks, make_engine, batch, tmp_path
):
    path = tmp_path / "bin"
    path.mkdir()
    torch.save(load_file(tiny / "model.safetensors"), path / "pytorch_model.bin")
    (path / "config.json").write_text((tiny / "config.json").read_text())
    assert_loads_as_in_one_piece(on_ranks, two, make_engine, path, batch, tmp_path, lora=LORA)


def test_models_that_can_not_be_loaded_are_refused_on_all_ranks(two, tiny, on_ranks, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        on_ranks(two, tmp_path / "nowhere")
    weights = load_file(tiny / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ModelError, match=r"lacks 1 .*'model\.layers\.1\.mlp"):
        on_ranks(two, tmp_path)
    on_ranks(two, tiny)
