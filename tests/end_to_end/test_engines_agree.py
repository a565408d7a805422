"""Rollout engines agree: the same weights find the same tokens equally likely, whichever engine computes it.

The measure is a plain forward pass of transformers in float32 on the CPU, one sequence at a time. On accelerators the weights
are bfloat16 numbers, so that what is left between the two is the arithmetic alone.

Each engine runs where it is installed, in this or in another environment. With `DOVETAIL_AGREE` set to a directory, every run
keeps what its engines found there and compares it with what those of earlier runs did. `-s` shows the differences.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from engines_here import ACCELERATOR, engine_settings, needs, served_here
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.interfaces import PluginContext, PluginRef, RolloutRequest, SamplingParams
from dovetail.plugins import make_plugin
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_sdk.testing.conformance.rollout.interrupting import collected
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

VOCABULARY = 320
LENGTH = 96
"""Tokens of the longest sequence."""


@attrs.frozen
class Place:
    """Where engines compute, in which numbers, and how far apart they may be, in nats a token."""

    device: str
    dtype: str
    layers: int
    mean: float
    largest: float


CPU = Place("cpu", "float32", layers=2, mean=1e-5, largest=1e-4)
GPU = Place("cuda", "bfloat16", layers=12, mean=0.06, largest=0.6)


@attrs.frozen
class Found:
    """What an engine found: log-probabilities (nats) of given tokens, and of those that it drew."""

    scores: np.ndarray
    drawn: list[np.ndarray]
    drawn_log_probs: np.ndarray


def sequences() -> list[np.ndarray]:
    """Token ids of mixed lengths, the same in every environment."""
    rng = np.random.default_rng(11)
    return [rng.integers(5, VOCABULARY, n) for n in (2, 3, 17, 32, 33, 64, 80, LENGTH)]


REQUEST = RolloutRequest(
    request_id="r",
    prompt_ids=np.arange(5, 25),
    sampling=SamplingParams(max_new_tokens=32, temperature=0.8, ignore_eos=True, log_probs=True),
    streams=tuple(SampleStream(seed=3, sample=sample) for sample in range(4)),
)


def differences(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean and largest absolute difference, in nats."""
    apart = np.abs(found.astype(np.float64) - expected)
    return float(apart.mean()), float(apart.max())


def check(what: str, place: Place, found: np.ndarray, expected: np.ndarray) -> None:
    mean, largest = differences(found, expected)
    print(
        f"{what}, {place.dtype}: mean {mean:.1e}, largest {largest:.1e} nats, {len(found)} tokens"
    )
    assert mean < place.mean
    assert largest < place.largest


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CPU, id="cpu"),
        pytest.param(
            GPU,
            id="gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not ACCELERATOR, reason="needs a GPU"),
            ],
        ),
    ],
)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture(scope="module")
def model(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with heads of 64, whose weights spread its predictions over several nats."""
    directory = tmp_path_factory.mktemp("agree") / "model"
    tiny_model_and_tokenizer(
        directory,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        layers=place.layers,
    )
    made: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            if weight.dim() > 1:
                spread = 0.12 if "embed" in name else 0.06
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    made.to(getattr(torch, place.dtype)).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainModel:
    return PlainModel.of(model)


def expected_of(plain: PlainModel) -> np.ndarray:
    """float32 [Σ (L_i − 1)]: what transformers finds of the sequences."""
    return np.concatenate([plain.score(ids_L) for ids_L in sequences()])


def ask(name: str, place: Place, model: Path, directory: Path) -> Found:
    """Start an engine, let it score the sequences and draw some samples, and close it."""
    config = importlib.import_module(f"dovetail_rollout_{name}.config")
    made = getattr(config, f"{name.capitalize()}RolloutConfig")
    settings = engine_settings(name, place.device, max_model_len=256)
    ref = PluginRef(kind="rollout", name=name, config=made(name=name, **settings))
    context = PluginContext(
        seed=1,
        role="rollout",
        run_directory=directory,
        device=place.device,
        model=ModelSection(path=str(model), dtype=place.dtype),
        tokenizer=AutoTokenizer.from_pretrained(str(model)),
    )
    engine: Any = make_plugin(ref, context)
    engine.start()
    try:
        return asyncio.run(_asked(engine))
    finally:
        engine.close()


async def _asked(engine: Any) -> Found:
    scores = await engine.score(sequences())
    completions = sorted(await collected(engine, REQUEST), key=lambda c: c.sample)
    return Found(
        scores=np.concatenate(scores),
        drawn=[completion.response_ids for completion in completions],
        drawn_log_probs=np.concatenate([completion.log_probs for completion in completions]),
    )


@pytest.fixture(
    scope="module",
    params=[
        "hf",
        pytest.param("vllm", marks=[pytest.mark.nightly, pytest.mark.vllm, needs("vllm")]),
        pytest.param("sglang", marks=[pytest.mark.nightly, pytest.mark.sglang, needs("sglang")]),
    ],
)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(
    engine: str, place: Place, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Found]:
    """What the engine found, in float32 on the CPU by PyTorch alone where its kernels need an accelerator."""
    with served_here(engine, place.device):
        yield ask(engine, place, model, tmp_path_factory.mktemp("run"))


def test_given_tokens_are_as_likely_as_in_transformers(
    engine: str, place: Place, found: Found, plain: PlainModel
) -> None:
    check(f"{engine} against transformers, given tokens", place, found.scores, expected_of(plain))


def test_drawn_tokens_are_as_likely_as_in_transformers(
    engine: str, place: Place, found: Found, plain: PlainModel
) -> None:
    assert [len(drawn) for drawn in found.drawn] == [32] * REQUEST.n
    temperature = REQUEST.sampling.temperature
    expected = [plain.log_probs(REQUEST.prompt_ids, ids, temperature) for ids in found.drawn]
    what = f"{engine} against transformers, its own tokens"
    check(what, place, found.drawn_log_probs, np.concatenate(expected))


def test_engines_agree_with_each_other(
    engine: str, place: Place, found: Found, model: Path, tmp_path: Path
) -> None:
    kept = Path(os.environ.get("DOVETAIL_AGREE") or tmp_path)
    kept.mkdir(parents=True, exist_ok=True)
    others: dict[str, np.ndarray] = {}
    if engine != "hf":
        others["hf"] = ask("hf", place, model, tmp_path).scores
    for file in sorted(kept.glob(f"*-{place.dtype}.npy")):
        others[file.stem.removesuffix(f"-{place.dtype}")] = np.load(file)
    np.save(kept / f"{engine}-{place.dtype}.npy", found.scores)
    others.pop(engine, None)
    if not others:
        pytest.skip("no other engine was asked here or before")
    for other, scores in others.items():
        check(f"{engine} against {other}, given tokens", place, found.scores, scores)


def test_the_bounds_tell_other_weights(place: Place, plain: PlainModel) -> None:
    changed = plain.changed()
    generator = torch.Generator().manual_seed(9)
    parameters = zip(changed._model.parameters(), plain._model.parameters(), strict=True)
    with torch.no_grad():
        for new, old in parameters:
            noise = torch.randn(old.shape, generator=generator)
            new.copy_(old + 0.1 * old.std(correction=0) * noise)
    expected = expected_of(plain)
    mean, _ = differences(expected_of(changed), expected)
    assert mean > 2 * place.mean
