"""FSDP2 against Megatron on one and two GPUs: scores, loss, gradient norm and updated weights on the same weights and batch.

The measure is plain transformers in float32. It stands alone, so that it runs where only torch, transformers, megatron-core
and these packages are: `python -m pytest -c /dev/null --noconftest -q plugins/train_megatron/tests/test_megatron_gpu.py`.
As a script it is one rank of some: it writes what every layout computed to files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

LAYOUTS = {
    "single": (1, {}),
    "single, computing again": (1, {"gradient_checkpointing": True}),
    "dp2": (2, {}),
    "dp2, overlapping": (2, {"overlap_gradients": True}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
DTYPES = ("float32", "bfloat16")
CASES = [
    *((engine, name, dtype) for engine in ("megatron",) for name in LAYOUTS for dtype in DTYPES),
    *(("fsdp2", name, dtype) for name in ("single", "dp2") for dtype in DTYPES),
]
# Largest errors: of log-probabilities and entropies (nats, on average), of loss and norm (relative), and of the step that
# the weights took (2-norm, relative to that of the step).
BOUNDS = {
    "float32": {"scores": 1e-5, "loss": 1e-5, "norm": 1e-4, "step": 2e-4},
    "bfloat16": {"scores": 5e-3, "loss": 5e-3, "norm": 1e-2, "step": 3e-2},
}
LR, EPS = 1e-2, 1e-3
"""Adam's division is nearly linear at this eps, so that small gradients do not become large differences."""
NAMES = frozenset({"log_probs", "entropies"})


def make_batch():
    """Samples of mixed lengths; some tokens are masked, and one sample has none to score."""
    from dovetail.batch import Batch, Ragged

    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 90, 24)
    masks = [np.zeros(n, bool) if i == 9 else rng.random(n) < 0.9 for i, n in enumerate(lengths)]
    mask = Ragged.from_list(masks, dtype=bool)
    prompts = [rng.integers(5, 2003, n) for n in rng.integers(1, 40, 24)]
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
            "response_ids": mask.with_values(rng.integers(5, 2003, len(mask.values))),
            "response_mask": mask,
            "temperature": rng.uniform(0.7, 1.2, 24).astype(np.float32),
            "advantages": rng.normal(size=24).astype(np.float32),
            "sample_id": [f"s{i}" for i in range(24)],
        }
    )


def make_objective():
    """A policy gradient with an entropy bonus."""
    from dovetail.config.builtin import TokenMeanConfig
    from dovetail.interfaces import ObjectiveSpec, PluginRef

    return ObjectiveSpec(
        policy_loss=PluginRef(kind="policy_loss", name="reinforce"),
        loss_aggregation=PluginRef(
            kind="loss_aggregation", name="token_mean", config=TokenMeanConfig()
        ),
        old_log_probs_from_current=True,
        requires=frozenset({"advantages"}),
        entropy_coef=0.01,
    )


def compute(kind, layout, dtype, model, out, rank, world):
    """One case on one rank: what it finds is written by the rank that has it."""
    from dovetail.config.sections import ModelSection, OptimSection, TrainingSection
    from dovetail.dispatch.division import divide
    from dovetail.dispatch.mesh import Mesh
    from dovetail.dispatch.processes import reduction_over
    from dovetail.interfaces import PluginContext
    from dovetail.telemetry.metrics import values

    if kind == "megatron":
        from dovetail_train_megatron.config import MegatronConfig as Config
        from dovetail_train_megatron.engine import MegatronEngine as Engine
    else:
        from dovetail_train_fsdp2.config import Fsdp2Config as Config
        from dovetail_train_fsdp2.engine import Fsdp2Engine as Engine
    config = Config(**layout)
    mesh = Mesh.over(world, **config.mesh_axes())
    context = PluginContext(
        role="actor",
        seed=1,
        model=ModelSection(path=str(model), dtype=dtype),
        training=TrainingSection(
            max_tokens_per_micro_batch=600, optim=OptimSection(lr=LR, eps=EPS, weight_decay=0.0)
        ),
        mesh=mesh,
        rank=rank,
        device=f"cuda:{rank}",
        reduction=reduction_over(mesh, rank),
    )
    engine = Engine(config, context)
    engine.start()
    whole, where = make_batch(), mesh.coordinates(rank)
    shares = divide(whole, mesh.axis_size("dp"), "sample")
    mine = shares.shares(whole)[where["dp"]]
    scores = engine.forward(mine, NAMES)
    metrics = values(engine.update(mine, make_objective()))
    engine.offload()
    engine.onload()
    after = engine.forward(mine, NAMES)
    engine.save(out / "state")
    engine.close()
    if (where["pp"], where["cp"], where["tp"]) == (mesh.axis_size("pp") - 1, 0, 0):
        arrays = {name: scores[name].values for name in NAMES} | {
            "after": after["log_probs"].values,
            "sample_id": np.array(mine["sample_id"]),
            "offsets": mine["response_mask"].offsets,
        }
        np.savez(out / f"scores-{where['dp']}.npz", **arrays)
        (out / f"metrics-{where['dp']}.json").write_text(json.dumps(metrics))


def main(rank, world, model, out):
    """One rank: every case of so many ranks, one after the other."""
    from dovetail.dispatch.processes import join_processes, leave_processes

    torch.cuda.set_device(rank)
    if world > 1:
        address = f"file://{out / 'store'}"
        join_processes(address=address, rank=rank, world=world, device=f"cuda:{rank}")
    for kind, name, dtype in CASES:
        ranks, layout = LAYOUTS[name]
        if ranks == world:
            folder = out / f"{kind}-{name}-{dtype}".replace(" ", "_").replace(",", "")
            folder.mkdir(exist_ok=True)
            compute(kind, layout, dtype, model, folder, rank, world)
            torch.cuda.empty_cache()
    if world > 1:
        leave_processes()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a small Qwen2 whose vocabulary two ranks do not divide."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2003, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    network = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            # bfloat16's own numbers, so that every dtype starts from the same weights.
            parameter.copy_(parameter.bfloat16())
    network.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reference(model):
    """Plain transformers in float32 on one GPU: loss, norm, scores, and weights before and after AdamW's step."""
    from transformers import Qwen2ForCausalLM

    network = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    before = {name: p.detach().cpu().clone() for name, p in network.named_parameters()}
    batch = make_batch()
    scores, rows = {"log_probs": [], "entropies": []}, []
    for i, (prompt, response) in enumerate(
        zip(batch["prompt_ids"], batch["response_ids"], strict=True)
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None].cuda()
        logits = network(ids).logits[0, len(prompt) - 1 : -1] / float(batch["temperature"][i])
        log_pi = logits.log_softmax(-1)
        chosen = log_pi.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        mask = torch.from_numpy(batch["response_mask"][i]).cuda()
        scores["log_probs"].append(chosen * mask)
        scores["entropies"].append(-(log_pi.exp() * log_pi).sum(-1) * mask)
        rows.append(-batch["advantages"][i] * scores["log_probs"][-1])
    count = batch["response_mask"].values.sum()
    loss = (torch.cat(rows) - 0.01 * torch.cat(scores["entropies"])).sum() / count
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
    out = tmp_path_factory.mktemp("out")
    for world in (1, 2):
        if torch.cuda.device_count() < world:
            continue
        (out / "store").unlink(missing_ok=True)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world), str(model), str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            for rank in range(world)
        ]
        for process in ranks:
            said, _ = process.communicate(timeout=240)
            if process.returncode:
                (out / f"failed-{world}.txt").write_bytes(said)
    return out


def stored(folder):
    """The float32 weights of a training state, whichever engine wrote it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder / "state" / "weights"))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(tuple(entry.size)) for name, entry in found.items()}
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "name", "dtype"), CASES)
def test_layouts_agree_with_plain_transformers(computed, reference, kind, name, dtype):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    world, _ = LAYOUTS[name]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    folder = computed / f"{kind}-{name}-{dtype}".replace(" ", "_").replace(",", "")
    failed = computed / f"failed-{world}.txt"
    complete = (folder / "metrics-0.json").exists()
    assert complete, failed.read_text()[-4000:] if failed.exists() else "nothing was written"
    loss, norm, scores, before, after = reference
    metrics = json.loads((folder / "metrics-0.json").read_text())
    losses = [json.loads(f.read_text())["actor/loss"] for f in folder.glob("metrics-*.json")]
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
        # A rank's loss is its samples' share: they add up.
        "loss": abs(sum(losses) / len(losses) - loss) / abs(loss) if len(losses) == 1 else 0.0,
        "norm": abs(metrics["actor/grad_norm"] - norm) / norm,
        "step": apart / step,
    }
    print(json.dumps({"engine": kind, "layout": name, "dtype": dtype, **found}))
    for key, bound in BOUNDS[dtype].items():
        assert found[key] <= bound, found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
