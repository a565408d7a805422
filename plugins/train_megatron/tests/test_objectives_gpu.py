"""Supervised fine-tuning and distillation on one and two GPUs, by FSDP2 with Ulysses and by Megatron: loss, gradient norm, updated
weights, and log-probabilities of a teacher's words, compared with plain transformers in float32.

See `gpu_ranks.py` for how to run this file. Legend: T response tokens, K words, V vocabulary.
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
    run_ranks,
    small_model,
    started,
    stored,
    written,
)

K, VOCABULARY = 5, 2003
LAYOUTS = {
    "megatron single": (1, {}),
    "megatron dp2": (2, {}),
    "megatron tp2": (2, {"tensor_parallel_size": 2}),
    "megatron pp2": (2, {"pipeline_parallel_size": 2}),
    "megatron cp2": (2, {"context_parallel_size": 2}),
    "fsdp2 single": (1, {}),
    "fsdp2 dp2": (2, {}),
    "fsdp2 ulysses2": (2, {"sequence_parallel_size": 2}),
}
CASES = [(layout, objective) for layout in LAYOUTS for objective in ("nll", "distill")]
BOUNDS = {"scores": 1e-5, "loss": 1e-5, "norm": 1e-4, "step": 2e-4}
"""Largest errors of log-probabilities (mean, in nats), and of loss, norm and the weights' step (relative)."""


def make_taught():
    """The batch at temperature 1, with a random teacher's likeliest words of every token."""
    from dovetail_distillation.columns import TOP_IDS, TOP_LOG_PROBS

    batch = make_batch()
    mask = batch["response_mask"]
    generator = torch.Generator().manual_seed(5)
    logits_TV = 3 * torch.randn(mask.total, VOCABULARY, generator=generator)
    top = logits_TV.log_softmax(-1).topk(K)
    return batch.with_columns(
        {
            "temperature": np.ones(len(batch), np.float32),
            TOP_IDS: mask.with_values(top.indices.numpy().astype(np.int32)),
            TOP_LOG_PROBS: mask.with_values(top.values.numpy()),
        }
    )


def compute(case, model, out, rank, world):
    """One case on one rank: what it finds is written by the rank that has it."""
    from dovetail.interfaces import OUTPUTS
    from dovetail.metrics import values
    from dovetail.plugins import objective_spec
    from dovetail_distillation.columns import TOP_IDS

    layout, objective = case
    if layout.startswith("megatron"):
        from dovetail_train_megatron.config import MegatronConfig as Config
        from dovetail_train_megatron.engine import MegatronEngine as Engine
    else:
        from dovetail_train_fsdp2.config import Fsdp2Config as Config
        from dovetail_train_fsdp2.engine import Fsdp2Engine as Engine
    config = Config(**LAYOUTS[layout][1])
    engine, mine, where, mesh = started(
        Engine, config, model, "float32", rank, world, make_taught()
    )
    at = OUTPUTS["log_probs_at"].sized(K, reads={TOP_IDS})
    scores = engine.forward(mine, frozenset({at}))
    options = {"top_k": K} if objective == "distill" else {}
    metrics = engine.update(mine, objective_spec(objective, **options))
    engine.save(out / "state")
    engine.close()
    if has_scores(where, mesh):
        found = scores["log_probs_at"]
        np.savez(
            out / f"scores-{where['dp']}.npz",
            at=found.values,
            offsets=found.offsets,
            sample_id=np.array(mine["sample_id"]),
        )
        share = metrics["actor/loss"]
        facts = values(metrics) | {"loss": [share.total, share.weight]}
        (out / f"metrics-{where['dp']}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a small model in float32."""
    return small_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module", params=["nll", "distill"])
def reference(request, model):
    """Plain transformers in float32 on one GPU: loss, norm, the words' log-probabilities, weights before and after AdamW's step."""
    from transformers import Qwen2ForCausalLM

    from dovetail_distillation.columns import TOP_IDS, TOP_LOG_PROBS

    network = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    before = {name: p.detach().cpu().clone() for name, p in network.named_parameters()}
    batch = make_taught()
    losses, scores = [], []
    for i, prompt in enumerate(batch["prompt_ids"]):
        response = batch["response_ids"][i]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None].cuda()
        log_pi_TV = network(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mask_T = torch.from_numpy(batch["response_mask"][i]).cuda()
        words_TK = torch.from_numpy(batch[TOP_IDS][i].astype(np.int64)).cuda()
        student_TK = log_pi_TV.gather(-1, words_TK)
        scores.append((student_TK * mask_T[:, None]).detach().cpu().numpy())
        if request.param == "nll":
            losses_T = -log_pi_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        else:
            teacher_TK = torch.from_numpy(batch[TOP_LOG_PROBS][i]).cuda()
            rest_T, left_T = (torch.log1p(-x.exp().sum(-1)) for x in (teacher_TK, student_TK))
            losses_T = (teacher_TK.exp() * (teacher_TK - student_TK)).sum(-1)
            losses_T = losses_T + rest_T.exp() * (rest_T - left_T)
        losses.append(losses_T[mask_T])
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    torch.optim.AdamW(
        network.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0
    ).step()
    after = {name: p.detach().cpu() for name, p in network.named_parameters()}
    return request.param, loss.item(), norm.item(), scores, before, after


@pytest.fixture(scope="module")
def computed(model, tmp_path_factory):
    """What every case computed, in folders; the GPUs that there are decide which cases run."""
    pytest.importorskip("dovetail_distillation", reason="needs dovetail-distillation")
    return run_ranks(__file__, model, tmp_path_factory.mktemp("out"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_plain_transformers(computed, reference, layout):
    objective, loss, norm, scores, before, after = reference
    folder = written(computed, (layout, objective), LAYOUTS[layout][0], "metrics-0.json")
    metrics = json.loads((folder / "metrics-0.json").read_text())
    shares = [json.loads(f.read_text())["loss"] for f in folder.glob("metrics-*.json")]
    total, weight = (sum(column) for column in zip(*shares, strict=True))
    differences, seen = [], 0
    for file in folder.glob("scores-*.npz"):
        part = np.load(file)
        for i, sample in enumerate(part["sample_id"]):
            tokens = slice(*part["offsets"][i : i + 2])
            differences.append(np.abs(part["at"][tokens] - scores[int(sample[1:])]).ravel())
            seen += 1
    assert seen == len(scores)
    state = stored(folder)
    assert state.keys() == after.keys()
    step = sum(float((after[n] - before[n]).square().sum()) for n in after) ** 0.5
    apart = sum(float((state[n] - after[n]).square().sum()) for n in after) ** 0.5
    found = {
        "scores": float(np.concatenate(differences).mean()),
        "loss": abs(total / weight - loss) / abs(loss),
        "norm": abs(metrics["actor/grad_norm"] - norm) / norm,
        "step": apart / step,
    }
    print(json.dumps({"layout": layout, "objective": objective, **found}))
    for key, bound in BOUNDS.items():
        assert found[key] <= bound, found


if __name__ == "__main__":
    be_one_rank({case: LAYOUTS[case[0]][0] for case in CASES}, compute)
