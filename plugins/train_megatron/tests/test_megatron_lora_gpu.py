"""Adapters of Megatron on one, two and four GPUs, compared with the same arithmetic on plain transformers: two updates, and the base.

See `gpu_ranks.py` for how to run this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_ranks import (
    EPS,
    LR,
    be_one_rank,
    has_scores,
    make_batch,
    make_objective,
    run_ranks,
    scored,
    small_model,
    started,
    stored,
    written,
)

LAYOUTS = {
    "single": (1, {}),
    "single, computing again": (1, {"gradient_checkpointing": True}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2, whole sequences": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2 tp2": (4, {"tensor_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2 cp2": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
}
DTYPES = ("float32", "bfloat16")
CASES = [(name, dtype) for name in LAYOUTS for dtype in DTYPES]
RANK, ALPHA, STEPS = 8, 16.0, 2
# Largest errors of log-probabilities (mean, in nats), of the norm (relative), and of the matrices' steps (2-norm, relative
# to the norm of the steps).
BOUNDS = {
    "float32": {"scores": 1e-5, "norm": 1e-4, "step": 5e-4},
    "bfloat16": {"scores": 5e-3, "norm": 2e-2, "step": 5e-2},
}


def compute(case, model, out, rank, world):
    """One case on one rank: what it finds is written by the rank that has it."""
    from dovetail.metrics import values
    from dovetail_torch_engines import LoraSection
    from dovetail_train_megatron.config import MegatronConfig
    from dovetail_train_megatron.engine import MegatronEngine

    name, dtype = case
    config = MegatronConfig(lora=LoraSection(rank=RANK, alpha=ALPHA), **LAYOUTS[name][1])
    engine, mine, where, mesh = started(MegatronEngine, config, model, dtype, rank, world)
    names = frozenset({"log_probs", "ref_log_probs"})
    before = engine.forward(mine, names)
    engine.save(out / "start" / "state")
    norms = []
    for _ in range(STEPS):
        norms.append(values(engine.update(mine, make_objective()))["actor/grad_norm"])
        engine.offload()
        freed = torch.cuda.memory_allocated()
        engine.onload()
    after = engine.forward(mine, names)
    engine.save(out / "state")
    engine.export(out / "exported")
    engine.close()
    if has_scores(where, mesh):
        np.savez(
            out / f"scores-{where['dp']}.npz",
            before=before["log_probs"].values,
            reference=before["ref_log_probs"].values,
            reference_after=after["ref_log_probs"].values,
            after=after["log_probs"].values,
            sample_id=np.array(mine["sample_id"]),
            offsets=mine["response_mask"].offsets,
        )
        facts = {"norms": norms, "bytes_while_offloaded": freed}
        (out / f"facts-{where['dp']}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a small model in bfloat16."""
    return small_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def computed(model, tmp_path_factory):
    """What every case computed, in folders; the GPUs that there are decide which cases run."""
    return run_ranks(__file__, model, tmp_path_factory.mktemp("out"))


def updated(model, start):
    """Adapters by hand on plain transformers in float32, from the matrices `start`: norms, scores before and after, matrices."""
    from transformers import Qwen2ForCausalLM

    network = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    network.requires_grad_(requires_grad=False)
    trained = {name: tensor.clone().cuda().requires_grad_() for name, tensor in start.items()}

    def adapt(layer, prefix):
        a, b = (trained[f"{prefix}.lora_{kind}.default.weight"] for kind in "AB")
        layer.register_forward_hook(lambda _, x, y: y + x[0] @ a.t() @ b.t() * (ALPHA / RANK))

    prefixes = {name.rpartition(".lora_")[0] for name in start}
    for name, layer in network.named_modules():
        if name in prefixes:
            adapt(layer, name)
    batch = make_batch()
    adam = torch.optim.AdamW(trained.values(), lr=LR, eps=EPS, weight_decay=0.0)
    norms, count = [], batch["response_mask"].values.sum()
    before = [row[0].detach().cpu().numpy() for row in scored(network, batch)]
    for _ in range(STEPS):
        rows = scored(network, batch)
        terms = [
            (-batch["advantages"][i] * row[0] - 0.01 * row[1]).sum() for i, row in enumerate(rows)
        ]
        adam.zero_grad()
        (torch.stack(terms).sum() / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        adam.step()
    with torch.no_grad():
        after = [row[0].cpu().numpy() for row in scored(network, batch)]
    return norms, before, after, {name: p.detach().cpu() for name, p in trained.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_adapters_agree_with_the_same_arithmetic_on_plain_transformers(
    computed, model, name, dtype
):
    folder = written(computed, (name, dtype), LAYOUTS[name][0], "facts-0.json")
    start, end = stored(folder / "start"), stored(folder)
    norms, before, after, expected = updated(model, start)
    assert end.keys() == expected.keys()
    assert len(end) == 2 * 7 * 4
    order = {f"s{i}": i for i in range(24)}
    differences = []
    for file in folder.glob("scores-*.npz"):
        part = np.load(file)
        np.testing.assert_array_equal(part["reference"], part["before"])
        np.testing.assert_array_equal(part["reference"], part["reference_after"])
        for i, sample in enumerate(part["sample_id"]):
            tokens = slice(*part["offsets"][i : i + 2])
            for got, wanted in (("before", before), ("after", after)):
                differences.append(np.abs(part[got][tokens] - wanted[order[sample]]))
    step = sum(float((expected[n] - start[n]).square().sum()) for n in start) ** 0.5
    apart = sum(float((expected[n] - end[n]).square().sum()) for n in start) ** 0.5
    facts = json.loads((folder / "facts-0.json").read_text())
    found = {
        "scores": float(np.concatenate(differences).mean()),
        "norm": max(abs(got - n) / n for got, n in zip(facts["norms"], norms, strict=True)),
        "step": apart / step,
    }
    print(json.dumps({"layout": name, "dtype": dtype, **facts, **found}))
    for key, bound in BOUNDS[dtype].items():
        assert found[key] <= bound, found


if __name__ == "__main__":
    be_one_rank({case: LAYOUTS[case[0]][0] for case in CASES}, compute)
