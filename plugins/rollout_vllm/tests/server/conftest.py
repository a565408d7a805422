"""A fake server with configurable answers, and the parts of rollouts on servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection
from dovetail_sdk.testing.fake_server import FakeServer
from dovetail_sdk.testing.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with opinions, of a head size that vLLM's attention on CPUs has."""
    import torch

    directory = tmp_path_factory.mktemp("served")
    tokenizer = tiny_tokenizer(directory, vocab_size=300)
    model = tiny_model(
        directory, tokenizer, hidden_size=64, intermediate_size=64, heads=2, kv_heads=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture
def context(served_model: Path, tmp_path: Path) -> PluginContext:
    """Of replica 0 of a run."""
    model = ModelSection(path=str(served_model), dtype="float32")
    return PluginContext(model=model, run_directory=tmp_path)
