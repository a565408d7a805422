"""Shared parts of the tests of Megatron on GPUs: a small model, a batch, an objective, ranks as processes, and comparisons.

The tests need only this file and no conftest, so that they run if only torch, transformers, megatron-core and these packages are
installed: `python -m pytest -c /dev/null --noconftest -q FILE`. Run as a script, a test file is one rank: it writes the results of
every case (a tuple of texts) to files in the case's own folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

LR, EPS = 1e-2, 1e-3
"""Learning rate and eps of Adam; with this eps, a step is nearly linear in the gradient, so that small errors stay small."""


def small_model(directory, *, dtype):
    """Write a Qwen2 whose vocabulary two ranks do not divide, with numbers that bfloat16 has, in this dtype."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2003, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().to(dtype).save_pretrained(directory)
    return directory


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
    from dovetail.plugins import objective_spec
    from dovetail.sections import PluginSection

    return objective_spec(
        "policy",
        policy_loss=PluginSection(name="reinforce"),
        entropy=True,
        scalars={"entropy_coef": 0.01},
    )


def started(engine_class, config, model, dtype, rank, world, whole=None):
    """This rank's engine, started, and its samples of `whole`, by default `make_batch()`, at its place in the mesh."""
    from dovetail.dispatch import Mesh
    from dovetail.interfaces import PluginContext
    from dovetail.plugins import plugin_section
    from dovetail.sections import ModelSection, TrainingSection
    from dovetail.workers import reduction_over
    from dovetail.workers.modes import divide

    mesh = Mesh.over(world, **config.mesh_axes())
    context = PluginContext(
        role="actor",
        seed=1,
        model=ModelSection(path=str(model), dtype=dtype),
        training=TrainingSection(
            max_tokens_per_micro_batch=600,
            optim=plugin_section("optimizer", "adamw", lr=LR, eps=EPS, weight_decay=0.0),
        ),
        mesh=mesh,
        rank=rank,
        device=f"cuda:{rank}",
        reduction=reduction_over(mesh, rank),
    )
    engine = engine_class(config, context)
    engine.start()
    whole, where = make_batch() if whole is None else whole, mesh.coordinates(rank)
    mine = divide(whole, mesh.axis_size("dp"), "sample").shares(whole)[where["dp"]]
    return engine, mine, where, mesh


def has_scores(where, mesh):
    """Whether the rank at this place is the one of its samples that has what was computed."""
    return (where["pp"], where["cp"], where["tp"]) == (mesh.axis_size("pp") - 1, 0, 0)


def be_one_rank(cases, compute):
    """Be the rank that `run_ranks` made this process, and compute the cases of so many ranks, one after the other.

    Args:
        cases: each case, and how many ranks compute it.
        compute: is given a case, the model's directory, the case's folder, the rank, and how many there are.
    """
    from dovetail.workers import join_processes, leave_processes

    rank, world, model, out = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])
    torch.cuda.set_device(rank)
    if world > 1:
        address = f"file://{out / 'store'}"
        join_processes(address=address, rank=rank, world=world, device=f"cuda:{rank}")
    for case in (case for case, ranks in cases.items() if ranks == world):
        folder = folder_of(out, case)
        folder.mkdir(exist_ok=True)
        compute(case, model, folder, rank, world)
        torch.cuda.empty_cache()
    if world > 1:
        leave_processes()


def folder_of(out, case):
    """Where a case writes."""
    return out / "-".join(case).replace(" ", "_").replace(",", "")


def written(out, case, ranks, last):
    """The folder of a case. Skips the test where the case could not run; fails it where the file `last` was not written."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    folder, failed = folder_of(out, case), out / f"failed-{ranks}.txt"
    if not (folder / last).exists():
        pytest.fail(failed.read_text()[-4000:] if failed.exists() else "nothing was written")
    return folder


def run_ranks(script, model, out):
    """Run a test's file as one rank, two and four, as far as there are GPUs; returns `out`, which the ranks write to.

    `failed-<ranks>.txt` has what a rank said that failed.
    """
    for world in (1, 2, 4):
        if torch.cuda.device_count() < world:
            continue
        (out / "store").unlink(missing_ok=True)
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(world), str(model), str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            for rank in range(world)
        ]
        reports = [_report_of(process) for process in ranks]
        failed = [said for said, status in reports if status]
        if failed:
            (out / f"failed-{world}.txt").write_bytes(b"\n".join(failed))
    return out


def _report_of(process, patience=240.0):
    """Return a rank's output and exit status; kill the rank after `patience` seconds."""
    try:
        said, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return said, process.returncode


def scored(network, batch):
    """Log-probabilities and entropies of every sample's tokens, one sample at a time; 0 where they are masked."""
    rows = []
    for i, prompt in enumerate(batch["prompt_ids"]):
        response = batch["response_ids"][i]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None].to(network.device)
        logits = network(ids).logits[0, len(prompt) - 1 : -1] / float(batch["temperature"][i])
        log_pi = logits.log_softmax(-1)
        mask = torch.from_numpy(batch["response_mask"][i]).to(network.device)
        chosen = log_pi.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        rows.append((chosen * mask, -(log_pi.exp() * log_pi).sum(-1) * mask))
    return rows


def stored(folder):
    """The float32 weights of a training state, whichever engine wrote it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder / "state" / "weights"))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(tuple(entry.size)) for name, entry in found.items()}
    load(state, storage_reader=reader, no_dist=True)
    return state
