"""A tiny model, configs with the model, and stand-ins for parts that SGLang lacks without an accelerator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.interfaces import PluginContext, PluginRef, RolloutRequest, SamplingParams
from dovetail.plugins import make_plugin
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_sdk.testing.fake_server import FakeServer
from dovetail_sdk.testing.replicas import replica_context
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_transports.config import SharedMemoryConfig

STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.fixture(scope="session")
def asking() -> Callable[..., RolloutRequest]:
    """Makes a request of n samples with 8 tokens each after the prompt 5 … 11."""

    def make(n: int = 4, **sampling: Any) -> RolloutRequest:
        settings = {"max_new_tokens": 8, "ignore_eos": True, "log_probs": True, **sampling}
        return RolloutRequest(
            request_id="r",
            prompt_ids=np.arange(5, 12),
            sampling=SamplingParams(**settings),
            streams=tuple(SampleStream(seed=1, sample=sample) for sample in range(n)),
        )

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 model with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("sglang") / "tiny", vocab_size=300)


@pytest.fixture
def config() -> Any:
    """Makes a config."""

    def make(**settings: Any) -> SglangRolloutConfig:
        return SglangRolloutConfig(name="sglang", **settings)

    return make


@pytest.fixture
def context(tiny: Path, tmp_path: Path) -> Any:
    """Makes the context of a replica in a run."""

    def make(**settings: Any) -> PluginContext:
        model = ModelSection(path=str(tiny), dtype="float32")
        told = {"seed": 1, "role": "rollout", "run_directory": tmp_path, "model": model}
        return PluginContext(**{**told, **settings})

    return make


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def stand_ins() -> Iterator[None]:
    """Servers that are started find modules that stand in for SGLang's kernels and for torchvision, where there is no accelerator."""
    if torch.accelerator.is_available():
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_INS), before)))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def started(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SglangRollout]:
    """Starts a replica on a real server; its weights come through shared memory, or as a transport's config says: from the
    first accelerator, whichever the replica's is.

    Without an accelerator it computes in float32 by PyTorch alone; else in bfloat16, with the further arguments of the
    environment variable `DOVETAIL_TEST_SGLANG_ARGUMENTS`, a JSON object.
    """
    arguments = json.loads((STAND_INS / "arguments.json").read_text())
    here: dict[str, Any] = {}
    settled: dict[str, Any] = {}
    if torch.accelerator.is_available():
        arguments = json.loads(os.environ.get("DOVETAIL_TEST_SGLANG_ARGUMENTS", "{}"))
        here = {"device": "cuda", "model": ModelSection(path=str(tiny), dtype="bfloat16")}
        settled = {"gpu_memory_utilization": 0.2}

    def start(*, carrier: Any = None, device: str | None = None, **settings: Any) -> SglangRollout:
        run = tmp_path_factory.mktemp("run")
        place = PluginContext(run_directory=run)
        if carrier is None:
            carrier = SharedMemoryConfig(name="shared_memory", timeout=10.0)
        elif here:
            place = attrs.evolve(place, role="actor", device="cuda:0")
        ref = PluginRef(kind="weight_transport", name=carrier.name, config=carrier)
        told = {**here, "transport": make_plugin(ref, place)}
        if device is not None:
            told["device"] = device
        config = SglangRolloutConfig(
            name="sglang", max_model_len=4096, engine_args=arguments, **{**settled, **settings}
        )
        engine = SglangRollout(config, replica_context(tiny, run, **told))
        engine.start()
        return engine

    return start
