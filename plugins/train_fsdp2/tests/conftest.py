"""Tiny models, batches and engines for the tests of the training engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.interfaces import (
    LossInputs,
    PluginContext,
    PluginRef,
    TokenLosses,
    WorkerSpec,
)
from dovetail.plugins import load_plugin_class, objective_spec, plugin_section
from dovetail.sections import ModelSection, TrainingSection
from dovetail_sdk.testing import tiny_model, tiny_model_and_tokenizer
from dovetail_sdk.testing.processes import ProcessRanks, preload
from dovetail_sdk.testing.shapes import checked
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.engine import Fsdp2Engine
from dovetail_train_fsdp2.forward import ModelRunner, PolicyRunner, ValueRunner
from dovetail_train_fsdp2.optim import ShardedOptimizer

VOCABULARY = 300

preload(
    "dovetail_train_fsdp2.engine",
    "dovetail_train_fsdp2.sharding",
    "peft",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
)


@pytest.fixture(scope="module", autouse=True)
def shapes():
    """Shapes that a ModelRunner and a loss state, checked in every test; jaxtyping's import hook checks the head."""
    with checked(LossInputs, TokenLosses, ModelRunner, PolicyRunner, ValueRunner):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("tiny"), vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64
    )


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """Directory of a tiny Qwen2 with an output layer of its own, and its tokenizer."""
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("untied"),
        vocab_size=VOCABULARY,
        hidden_size=32,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="session")
def classifier(tiny, tmp_path_factory):
    """Directory of a checkpoint with a value head of its own: a Qwen2 token classifier of one label."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tiny_model(directory, tokenizer, hidden_size=32, intermediate_size=64, head="value")
    return directory


@pytest.fixture
def make_engine():
    """Start engines; close them after the test."""
    started = []

    def make(
        path,
        *,
        dtype="float32",
        budget=16384,
        config=None,
        transport=None,
        total_steps=None,
        **training,
    ):
        clip = training.pop("grad_clip", 1.0)
        head = training.pop("head", "lm")
        context = PluginContext(
            role=training.pop("role", "actor" if head == "lm" else "critic"),
            head=head,
            seed=training.pop("seed", 0),
            trained=training.pop("trained", True),
            model=ModelSection(
                path=str(path), dtype=dtype, attn_implementation=training.pop("attention", "sdpa")
            ),
            training=TrainingSection(
                max_tokens_per_micro_batch=budget,
                grad_clip=clip,
                optim=plugin_section("optimizer", **{"name": "adamw", "lr": 1e-3, **training}),
            ),
            total_steps=total_steps,
            transport=transport,
            tokenizer=None,
        )
        engine = Fsdp2Engine(config or Fsdp2Config(), context)
        engine.start()
        started.append(engine)
        return engine

    yield make
    for engine in started:
        engine.close()


# Closed after each module: gloo's threads poll, so that ranks kept for the whole session would use half a core while idle.
@pytest.fixture(scope="module")
def two():
    """Two processes, joined."""
    with ProcessRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    """Four processes, joined."""
    with ProcessRanks(4) as ranks:
        yield ranks


@pytest.fixture
def on_ranks():
    """Start an engine on every one of some ranks, as a runtime would; close it after the test."""
    groups = []

    def start(
        ranks,
        path,
        *,
        role="actor",
        head="lm",
        dtype="float32",
        budget=64,
        grad_clip=1.0,
        transport=None,
        optim=None,
        mesh=None,
        any_head=False,
        dropout=False,
        seed=3,
        **config,
    ):
        config = Fsdp2Config(name="fsdp2", **config)
        context = PluginContext(
            role=role,
            head=head,
            seed=seed,
            model=ModelSection(path=str(path), dtype=dtype),
            training=TrainingSection(
                max_tokens_per_micro_batch=budget,
                grad_clip=grad_clip,
                optim=plugin_section("optimizer", **{"name": "adamw", "lr": 1e-3, **(optim or {})}),
            ),
        )
        plugin = PluginRef(kind="engine", name="fsdp2", config=config)
        if any_head or dropout:
            file = str(Path(__file__).parent / ("any_head.py" if any_head else "dropout.py"))
            variant = "AnyHead" if any_head else "WithDropout"
            plugin = PluginRef(
                kind="engine", name=variant, path=file, attribute=variant, config=config
            )
            load_plugin_class(plugin)  # Needed to unpickle ranks' answers.
        spec = WorkerSpec(role=role, plugin=plugin, context=context, transport=transport)
        mesh = mesh or Mesh.over(ranks.world, **config.mesh_axes())
        groups.append(ranks.worker_group(spec, mesh))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.fixture
def gradients(monkeypatch):
    """Run one update and return its gradients by name and its metrics; weights stay as they are."""

    def run(engine, batch, objective):
        seen = {}

        def keep(self, finite):
            assert finite
            seen.update({n: p.grad.clone() for n, p in self._named.items() if p.grad is not None})
            self.discard_gradients()
            return 0.0, 0.0

        with monkeypatch.context() as patch:
            patch.setattr(ShardedOptimizer, "step", keep)
            metrics = engine.update(batch, objective)
        return seen, {name: metric.value for name, metric in metrics.items()}

    return run


def make_batch(seed=0, groups=3, n=4, *, equal=False, masked=True, temperature=None):
    """Groups of samples with one prompt each, of mixed lengths, some tokens of some responses masked."""
    rng = np.random.default_rng(seed)
    prompts, responses, masks = [], [], []
    for _ in range(groups):
        prompt = rng.integers(0, VOCABULARY, 6 if equal else rng.integers(1, 12))
        for _ in range(n):
            length = 8 if equal else int(rng.integers(0, 11))
            prompts.append(prompt)
            responses.append(rng.integers(0, VOCABULARY, length))
            masks.append(rng.random(length) < 0.8 if masked else np.ones(length, bool))
    count = groups * n
    mask = Ragged.from_list(masks, dtype=bool)
    column = lambda low, high: mask.with_values(  # noqa: E731
        rng.uniform(low, high, len(mask.values)).astype(np.float32)
    )
    if temperature is None:
        temperature = rng.uniform(0.5, 1.5, count)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
            "response_ids": Ragged.from_list(responses, dtype=np.int64),
            "response_mask": mask,
            "temperature": np.broadcast_to(temperature, count).astype(np.float32),
            "advantages": rng.normal(size=count).astype(np.float32),
            "old_log_probs": column(-7, -4),
            "ref_log_probs": column(-7, -4),
            "sample_id": [f"s{i}" for i in range(count)],
        }
    )


def make_objective(**spec):
    """PPO with token mean, and what else the spec names."""
    return objective_spec("policy", **spec)


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture
def new_batch():
    return make_batch


@pytest.fixture
def valued(batch):
    """The batch with values before the update and returns."""
    mask, rng = batch["response_mask"], np.random.default_rng(5)
    found = rng.normal(size=(2, len(mask.values))).astype(np.float32)
    return batch.with_columns(
        {n: mask.with_values(v) for n, v in zip(("values", "returns"), found, strict=True)}
    )


@pytest.fixture
def unscored(batch):
    """The batch without a token to train on."""
    mask = batch["response_mask"]
    return batch.with_columns({"response_mask": mask.with_values(np.zeros_like(mask.values))})


@pytest.fixture
def objective():
    """On-policy PPO with a KL penalty and an entropy bonus."""
    return make_objective(
        old_log_probs_from_current=True,
        kl="k3",
        entropy=True,
        scalars={"kl_coef": 0.1, "entropy_coef": 0.01},
    )


@pytest.fixture
def new_objective():
    return make_objective


@pytest.fixture
def one_by_one():
    """The oracle: every sample by itself through transformers, in float64.

    Returns log-probabilities, entropies and sums of squared probabilities as lists of arrays, masked tokens 0.
    """
    from transformers import AutoModelForCausalLM

    def score(path, batch):
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        scores = {"log_probs": [], "entropies": [], "sum_pi_squared": []}
        rows = zip(
            batch["prompt_ids"],
            batch["response_ids"],
            batch["response_mask"],
            batch["temperature"],
            strict=True,
        )
        for prompt, response, mask, temperature in rows:
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : ids.shape[1] - 1]
            log_pi = (logits / float(temperature)).log_softmax(-1)[: len(response)]
            chosen = log_pi[torch.arange(len(response)), torch.from_numpy(response)]
            for name, values in {
                "log_probs": chosen,
                "entropies": -(log_pi.exp() * log_pi).sum(-1),
                "sum_pi_squared": log_pi.exp().square().sum(-1),
            }.items():
                scores[name].append(np.where(mask, values.numpy(), 0))
        return scores

    return score
