"""A base in 4 bits below an adapter: results and gradients equal those of LoRA on the rounded weights."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained_engines import parameters_of
from transformers import AutoModelForCausalLM

from dovetail_torch_engines import LoraSection
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.quantised import Nf4Linear, dequantised, quantised

pytest.importorskip("torchao", reason="needs torchao")
QLORA = LoraSection(rank=8, base="nf4")
SCORES = frozenset({"log_probs", "ref_log_probs"})


@pytest.fixture(scope="module")
def rounded(tiny, tmp_path_factory):
    """The same model with the weights of its linear layers rounded to 4 bits, in float32."""
    directory = tmp_path_factory.mktemp("rounded")
    model = AutoModelForCausalLM.from_pretrained(str(tiny), dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(dequantised(quantised(module.weight)))
    model.save_pretrained(str(directory))
    return directory


def test_scores_updates_and_gradients_are_those_of_lora_on_the_rounded_weights(
    tiny, rounded, make_engine, batch, objective
):
    plain, packed = (
        make_engine(path, config=Fsdp2Config(lora=lora), lr=1e-2, eps=1e-3)
        for path, lora in ((rounded, LoraSection(rank=8)), (tiny, QLORA))
    )
    assert any(isinstance(m, Nf4Linear) for m in packed._runner.model.modules())
    gradients = []
    for engine in (plain, packed):
        kept = {}
        for name, parameter in engine._runner.model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, kept=kept: kept.update({name: p.grad.clone()})
            )
        gradients.append(kept)
    for _ in range(3):
        for engine in (plain, packed):
            engine.update(batch, objective)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    found, expected = (engine.forward(batch, SCORES) for engine in (packed, plain))
    unrounded = make_engine(tiny).forward(batch, frozenset({"log_probs"}))["log_probs"].values
    for name in SCORES:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-5, atol=1e-5)
    # The reference is the rounded model, not the model in full precision.
    assert abs(found["ref_log_probs"].values - unrounded).max() > 1e-3


def test_what_is_exported_sent_and_resumed_is_the_rounded_model_with_the_update(
    tiny, make_engine, batch, objective, tmp_path
):
    config = Fsdp2Config(lora=QLORA)
    engine = make_engine(tiny, config=config, lr=1e-1)
    for _ in range(2):
        engine.update(batch, objective)
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "now")
    engine.export_saved(tmp_path / "state", tmp_path / "later")
    now, later = (load_file(tmp_path / p / "model.safetensors") for p in ("now", "later"))
    torch.testing.assert_close(later, now, rtol=0, atol=0)
    sent = {spec.name for spec in engine.weight_manifest(1).tensors}
    assert sent == now.keys()
    merged = make_engine(tmp_path / "now").forward(batch, frozenset({"log_probs"}))
    own = engine.forward(batch, frozenset({"log_probs"}))
    scores = (each["log_probs"].values for each in (merged, own))
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=2e-5)
    resumed = make_engine(tiny, config=config, lr=1e-1)
    resumed.load(tmp_path / "state")
    for one in (engine, resumed):
        one.update(batch, objective)
    one, other = (parameters_of(each, trained=True) for each in (engine, resumed))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_base_takes_a_seventh_of_its_memory_in_float32(tiny, make_engine):
    engine = make_engine(tiny, config=Fsdp2Config(lora=QLORA))
    layers = [m for m in engine._runner.model.modules() if isinstance(m, Nf4Linear)]
    taken = sum(
        getattr(layer.weight, name).nbytes
        for layer in layers
        for name in ("quantized_data", "quantized_scalers", "quantization_factor")
    )
    full = sum(4 * layer.weight.numel() for layer in layers)
    assert taken < full / 7


def test_ranks_hold_the_rounded_weights_whole_and_train_as_one(
    two, tiny, on_ranks, make_engine, batch, objective
):
    alone = make_engine(tiny, seed=3, config=Fsdp2Config(lora=QLORA), lr=1e-2, eps=1e-3)
    group = on_ranks(two, tiny, lora=QLORA, optim={"lr": 1e-2, "eps": 1e-3})
    for _ in range(2):
        alone.update(batch, objective)
        group.update(batch, objective).result()
    found, expected = group.forward(batch, SCORES).result(), alone.forward(batch, SCORES)
    for name in SCORES:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "fix"),
    [
        (lambda: LoraSection(base="nf4", sync="adapter"), "sync=merged"),
        (lambda: LoraSection(base="nf4", dora=True), "dora=false"),
        (lambda: Fsdp2Config(compile=True, lora=QLORA), "compile=false"),
    ],
)
def test_what_does_not_go_with_4_bits_is_refused_with_the_fix(section, fix):
    with pytest.raises(ValueError, match=fix):
        section()
