"""FSDP2 against Megatron on one, two and four GPUs: scores, loss, gradient norm and updated weights on the same weights and batch.

The reference is plain transformers in float32. See `gpu_ranks.py` for how to run this file.
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
    "dp2, overlapping": (2, {"overlap_gradients": True}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp4": (4, {"tensor_parallel_size": 4}),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "dp2 tp2": (4, {"tensor_parallel_size": 2, "overlap_gradients": True}),
    "dp2 pp2": (4, {"pipeline_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2 cp2": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
    "pp2 cp2": (4, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
    "dp4": (4, {}),
}
DTYPES = ("float32", "bfloat16")
CASES = [
    *((engine, name, dtype) for engine in ("megatron",) for name in LAYOUTS for dtype in DTYPES),
    *(("fsdp2", name, dtype) for name in ("single", "dp2", "dp4") for dtype in DTYPES),
]
# Largest errors of log-probabilities and entropies (mean, in nats), of loss and norm (relative), and of the weights' step
# (2-norm, relative to the norm of the step).
BOUNDS = {
    "float32": {"scores": 1e-5, "loss": 1e-5, "norm": 1e-4, "step": 2e-4},
    "bfloat16": {"scores": 5e-3, "loss": 5e-3, "norm": 1e-2, "step": 3e-2},
}
NAMES = frozenset({"log_probs", "entropies"})


def compute(case, model, out, rank, world):
    """One case on one rank: what it finds is written by the rank that has it."""
    from dovetail.metrics import values

    kind, name, dtype = case

    if kind == "megatron":
        from dovetail_train_megatron.config import MegatronConfig as Config
        from dovetail_train_megatron.engine import MegatronEngine as Engine
    else:
        from dovetail_train_fsdp2.config import Fsdp2Config as Config
        from dovetail_train_fsdp2.engine import Fsdp2Engine as Engine
    engine, mine, where, mesh = started(
        Engine, Config(**LAYOUTS[name][1]), model, dtype, rank, world
    )
    scores = engine.forward(mine, NAMES)
    metrics = engine.update(mine, make_objective())
    engine.offload()
    engine.onload()
    after = engine.forward(mine, NAMES)
    engine.save(out / "state")
    engine.close()
    if has_scores(where, mesh):
        arrays = {name: scores[name].values for name in NAMES} | {
            "after": after["log_probs"].values,
            "sample_id": np.array(mine["sample_id"]),
            "offsets": mine["response_mask"].offsets,
        }
        np.savez(out / f"scores-{where['dp']}.npz", **arrays)
        share = metrics["actor/loss"]
        facts = values(metrics) | {"loss": [share.total, share.weight]}
        (out / f"metrics-{where['dp']}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a small model in float32, so that every dtype starts from the same weights."""
    return small_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(model):
    """Plain transformers in float32 on one GPU: loss, norm, scores, and weights before and after AdamW's step."""
    from transformers import Qwen2ForCausalLM

    network = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    before = {name: p.detach().cpu().clone() for name, p in network.named_parameters()}
    batch = make_batch()
    log_probs, entropies = zip(*scored(network, batch), strict=True)
    scores = {"log_probs": log_probs, "entropies": entropies}
    rows = [-batch["advantages"][i] * row for i, row in enumerate(log_probs)]
    count = batch["response_mask"].values.sum()
    loss = (torch.cat(rows) - 0.01 * torch.cat(entropies)).sum() / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    torch.optim.AdamW(
        network.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0
    ).step()
    after = {name: p.detach().cpu() for name, p in network.named_parameters()}
    found = {n: [v.detach().cpu().numpy() for v in parts] for n, parts in scores.items()}
    return loss.item(), norm.item(), found, before, after


@pytest.fixture(scope="module")
def computed(model, tmp_path_factory):
    """What every case computed, in folders; the GPUs that there are decide which cases run."""
    return run_ranks(__file__, model, tmp_path_factory.mktemp("out"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "name", "dtype"), CASES)
def test_layouts_agree_with_plain_transformers(computed, reference, kind, name, dtype):
    folder = written(computed, (kind, name, dtype), LAYOUTS[name][0], "metrics-0.json")
    loss, norm, scores, before, after = reference
    metrics = json.loads((folder / "metrics-0.json").read_text())
    shares = [json.loads(f.read_text())["loss"] for f in folder.glob("metrics-*.json")]
    total, weight = (sum(column) for column in zip(*shares, strict=True))
    order = {f"s{i}": i for i in range(24)}
    differences = {key: [] for key in scores}
    for file in folder.glob("scores-*.npz"):
        part = np.load(file)
        for i, sample in enumerate(part["sample_id"]):
            tokens = slice(*part["offsets"][i : i + 2])
            for key in scores:
                differences[key].append(np.abs(part[key][tokens] - scores[key][order[sample]]))
    errors = {key: float(np.concatenate(parts).mean()) for key, parts in differences.items()}
    state = stored(folder)
    assert state.keys() == after.keys()
    step = sum(float((after[n] - before[n]).square().sum()) for n in after) ** 0.5
    apart = sum(float((state[n] - after[n]).square().sum()) for n in after) ** 0.5
    found = {
        "scores": max(errors.values()),
        "loss": abs(total / weight - loss) / abs(loss),
        "norm": abs(metrics["actor/grad_norm"] - norm) / norm,
        "step": apart / step,
    }
    print(json.dumps({"engine": kind, "layout": name, "dtype": dtype, **found}))
    for key, bound in BOUNDS[dtype].items():
        assert found[key] <= bound, found


if __name__ == "__main__":
    be_one_rank({case: LAYOUTS[case[1]][0] for case in CASES}, compute)
