"""A tiny model, configs on it, and stand-ins for what SGLang lacks without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.sections import ModelSection
from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_sdk.testing.fake_server import FakeServer
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

STAND_INS = Path(__file__).with_name("stand_ins")


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
    """Servers that are started find modules that stand in for SGLang's kernels and for torchvision."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_INS), before)))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
