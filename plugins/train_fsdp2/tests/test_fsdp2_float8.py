"""Matrix products in float8: scores and gradients are close to those of the full dtype, but not equal."""

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail_torch_engines import LoraSection
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.float8 import multiply_in_float8

torchao = pytest.importorskip("torchao.float8", reason="needs torchao")
SCORES = frozenset({"log_probs"})


def gradients(engine, batch, objective):
    """Of the next update, by the names of the weights."""
    kept = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: kept.update({name: p.grad.clone()})
        )
        for name, parameter in engine._runner.model.named_parameters()
    ]
    engine.update(batch, objective)
    for hook in hooks:
        hook.remove()
    return kept


def test_scores_and_gradients_are_near_those_of_full_products(tiny, make_engine, batch, objective):
    plain, rounded = (
        make_engine(tiny, config=Fsdp2Config(float8=how)) for how in (None, "rowwise")
    )
    expected, found = (e.forward(batch, SCORES)["log_probs"].values for e in (plain, rounded))
    assert 1e-6 < abs(found - expected).mean() < 0.02
    of_plain, of_rounded = (gradients(e, batch, objective) for e in (plain, rounded))
    assert of_plain.keys() == of_rounded.keys()
    for name, gradient in of_plain.items():
        if gradient.norm() > 1e-6:
            error = (of_rounded[name] - gradient).norm() / gradient.norm()
            assert error < 0.25, name
            assert not torch.equal(of_rounded[name], gradient) or "embed" in name


def test_what_is_saved_and_sent_is_as_without_it(tiny, make_engine, batch, objective, tmp_path):
    plain, rounded = (
        make_engine(tiny, config=Fsdp2Config(float8=how)) for how in (None, "rowwise")
    )
    assert plain.weight_manifest(1) == rounded.weight_manifest(1)
    rounded.update(batch, objective)
    rounded.save(tmp_path)
    plain.load(tmp_path)
    theirs = dict(rounded._runner.model.named_parameters())
    for name, parameter in plain._runner.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_layers_that_do_not_divide_stay():
    layers = torch.nn.ModuleDict({"even": torch.nn.Linear(32, 48), "odd": torch.nn.Linear(32, 40)})
    multiply_in_float8([layers], torch.device("cpu"))
    assert type(layers["odd"]) is torch.nn.Linear
    assert type(layers["even"]).__name__ == "Float8Linear"


def test_it_is_refused_beside_adapters_and_on_devices_without_it(monkeypatch):
    with pytest.raises(ValueError, match="float8=rowwise can't be combined with lora"):
        Fsdp2Config(float8="rowwise", lora=LoraSection(rank=4))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=r"capability 8\.9 or.*is A100"):
        multiply_in_float8([], torch.device("cuda", 0))
