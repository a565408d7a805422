"""Tiny models, batches and engines for the tests of the Megatron engine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.plugins import load_plugin_class, objective_spec, plugin_section
from dovetail.sections import ModelSection, PluginSection, TrainingSection
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.processes import ProcessRanks, preload
from dovetail_train_megatron.config import MegatronConfig

HERE = Path(__file__).parent
# Ranks load the stand-in by its file; tests import it by name.
sys.path.insert(0, str(HERE))
VOCABULARY = 301
"""Size of the vocabulary, which two ranks do not divide, so that it is padded."""

preload("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer", "mbridge", "peft")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        layers=2,
    )


# Closed after each module: gloo's threads poll, so that ranks kept for the whole session would use half a core while idle.
@pytest.fixture(scope="module")
def two():
    """Two processes, joined."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    pytest.importorskip("mbridge", reason="needs mbridge")
    with ProcessRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    """Four processes, joined."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    pytest.importorskip("mbridge", reason="needs mbridge")
    with ProcessRanks(4) as ranks:
        yield ranks


def with_defaults(optim):
    """The settings of an optimizer: by default AdamW with a large learning rate and denominator."""
    if optim is not None and "name" in optim:
        return optim
    return {"name": "adamw", "lr": 1e-2, "eps": 1e-3, **(optim or {})}


@pytest.fixture
def on_ranks():
    """Start an engine on every one of some ranks, with CUDA stood in for; close it after the test."""
    groups = []

    def start(
        ranks,
        path,
        *,
        head="lm",
        budget=64,
        transport=None,
        optim=None,
        dtype="float32",
        grad_clip=1.0,
        seed=3,
        engine="MegatronOnCpu",
        **config,
    ):
        config = MegatronConfig(name="megatron", **config)
        context = PluginContext(
            role="actor" if head == "lm" else "critic",
            head=head,
            seed=seed,
            model=ModelSection(path=str(path), dtype=dtype),
            training=TrainingSection(
                max_tokens_per_micro_batch=budget,
                grad_clip=grad_clip,
                optim=plugin_section("optimizer", **with_defaults(optim)),
            ),
        )
        plugin = PluginRef(
            kind="engine",
            name=engine,
            path=str(HERE / "cuda_stand_in.py"),
            attribute=engine,
            config=config,
        )
        load_plugin_class(plugin)  # Needed to unpickle ranks' answers.
        spec = WorkerSpec(role=context.role, plugin=plugin, context=context, transport=transport)
        groups.append(ranks.worker_group(spec, Mesh.over(ranks.world, **config.mesh_axes())))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.fixture
def other_engine(two):
    """Start the engine fsdp2 on two ranks, as `on_ranks` starts this one."""
    pytest.importorskip("dovetail_train_fsdp2", reason="needs dovetail-train-fsdp2")
    from dovetail_train_fsdp2.config import Fsdp2Config

    groups = []

    def start(path, *, head="lm", **config):
        context = PluginContext(
            role="actor" if head == "lm" else "critic",
            head=head,
            seed=3,
            model=ModelSection(path=str(path), dtype="float32"),
            training=TrainingSection(optim=plugin_section("optimizer", **with_defaults(None))),
        )
        plugin = PluginRef(kind="engine", name="fsdp2", config=Fsdp2Config(name="fsdp2", **config))
        spec = WorkerSpec(role=context.role, plugin=plugin, context=context)
        groups.append(two.worker_group(spec, Mesh(dp=2)))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.fixture
def batch():
    """Samples of mixed lengths, some tokens of some responses masked, one without a token to score."""
    rng = np.random.default_rng(5)
    prompts, responses, masks = [], [], []
    for i in range(12):
        length = int(rng.integers(1, 14))
        prompts.append(rng.integers(5, VOCABULARY, rng.integers(1, 12)))
        responses.append(rng.integers(5, VOCABULARY, length))
        masks.append(np.zeros(length, bool) if i == 7 else rng.random(length) < 0.8)
    mask = Ragged.from_list(masks, dtype=bool)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
            "response_ids": Ragged.from_list(responses, dtype=np.int64),
            "response_mask": mask,
            "temperature": rng.uniform(0.5, 1.5, 12).astype(np.float32),
            "advantages": rng.normal(size=12).astype(np.float32),
            "ref_log_probs": mask.with_values(
                rng.uniform(-7, -4, len(mask.values)).astype(np.float32)
            ),
            "sample_id": [f"s{i}" for i in range(12)],
        }
    )


@pytest.fixture
def objective():
    """A policy gradient with a KL penalty and an entropy bonus."""
    return objective_spec(
        "policy",
        policy_loss=PluginSection(name="reinforce"),
        kl="k2",
        entropy=True,
        scalars={"kl_coef": 0.1, "entropy_coef": 0.01},
    )


@pytest.fixture
def plain():
    """The oracle: transformers and torch alone, one AdamW step.

    Returns the loss, the gradient's norm before clipping, the scores by name, and the weights after the step.
    """

    def step(path, batch, *, dtype=torch.float32, lr=1e-2, eps=1e-3, clip=1.0):
        from plain_loss import loss_of
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        loss, found = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim = plugin_section("optimizer", "adamw")
        torch.optim.AdamW(
            model.parameters(), lr=lr, betas=optim.betas, eps=eps, weight_decay=optim.weight_decay
        ).step()
        weights = {name: p.detach().float() for name, p in model.named_parameters()}
        arrays = {name: values.detach().numpy() for name, values in found.items()}
        return loss.item(), norm.item(), arrays, weights

    return step
