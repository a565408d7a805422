"""Every optimizer: updates do not depend on micro-batches, and a run resumes bit for bit, also with adapters."""

import pytest
import torch
from trained_engines import parameters_of

from dovetail.errors import CheckpointError
from dovetail_torch_engines import LoraSection
from dovetail_train_fsdp2.config import Fsdp2Config

OPTIMIZERS = {
    "adamw": {"name": "adamw", "lr": 1e-2, "eps": 1e-3},
    "adamw_8bit": {"name": "adamw_8bit", "lr": 1e-2, "eps": 1e-3},
    "muon": {"name": "muon", "lr": 1e-2, "adamw_lr": 1e-3, "eps": 1e-3},
    "momentum": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
    "adafactor": {"name": "adafactor", "lr": 1e-2},
}


@pytest.fixture(autouse=True)
def eager(request):
    """torchao's kernels are not compiled, which takes a minute."""
    if "adamw_8bit" in request.node.name:
        pytest.importorskip("torchao", reason="needs torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("lora", [None, LoraSection(rank=8)], ids=["whole", "lora"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes_bit_for_bit(tiny, make_engine, batch, objective, tmp_path, name, lora):
    config = Fsdp2Config(lora=lora)
    undisturbed = make_engine(tiny, config=config, **OPTIMIZERS[name])
    for _ in range(2):
        undisturbed.update(batch, objective)
    undisturbed.save(tmp_path)
    resumed = make_engine(tiny, config=config, **OPTIMIZERS[name])
    resumed.load(tmp_path)
    for engine in (undisturbed, resumed):
        engine.offload()
        engine.onload()
        engine.update(batch, objective)
    before, after, start = (
        parameters_of(engine, trained=True)
        for engine in (undisturbed, resumed, make_engine(tiny, config=config))
    )
    assert any((before[key] != start[key]).any() for key in start)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_do_not_matter(tiny, make_engine, batch, objective, name):
    # Muon rounds to bfloat16, and 8-bit moments are rounded to 256 values.
    rounded = name in ("muon", "adamw_8bit")
    found = []
    for budget in (24, 4096):
        engine = make_engine(tiny, budget=budget, **OPTIMIZERS[name])
        start = parameters_of(engine)
        for _ in range(2):
            engine.update(batch, objective)
        found.append({key: value - start[key] for key, value in parameters_of(engine).items()})
    one, other = (torch.cat([v.flatten() for v in moved.values()]) for moved in found)
    assert (one - other).norm() <= (2e-2 if rounded else 1e-3) * other.norm()


def test_another_optimizer_does_not_go_on_from_a_state(
    tiny, make_engine, batch, objective, tmp_path
):
    engine = make_engine(tiny, **OPTIMIZERS["muon"])
    engine.update(batch, objective)
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer"):
        make_engine(tiny, **OPTIMIZERS["adamw"]).load(tmp_path)
