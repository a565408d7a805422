"""A tiny model, and rollouts on it that need no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config.sections import ModelSection
from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 and a tokenizer: vLLM has no smaller heads on a CPU."""
    directory = tmp_path_factory.mktemp("vllm") / "tiny"
    return tiny_model_and_tokenizer(directory, vocab_size=300, hidden_size=128)


@pytest.fixture
def config() -> Any:
    """Makes a config."""

    def make(**settings: Any) -> VllmRolloutConfig:
        return VllmRolloutConfig(name="vllm", **settings)

    return make


@pytest.fixture
def context(tiny: Path, tmp_path: Path) -> Any:
    """Makes the context of a replica in a run."""

    def make(**settings: Any) -> PluginContext:
        model = ModelSection(path=str(tiny), dtype="float32")
        told = {"seed": 1, "role": "rollout", "run_directory": tmp_path, "model": model}
        return PluginContext(**{**told, **settings})

    return make
