"""The stand-in for TensorRT-LLM in servers' processes, tiny models, and what tests do with replicas."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail_rollout_trtllm import backend, versions
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_sdk.testing.fake_server import FakeServer
from dovetail_sdk.testing.replicas import replica_context
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_transports.config import SharedMemoryConfig

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="module")
def stand_in() -> Iterator[Path]:
    """Servers that are started find the stand-in where they look for TensorRT-LLM; this process takes it for installed.

    It is not TensorRT-LLM: it says the same things of itself, and generates with transformers.
    """
    before = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(STAND_IN), before))))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(backend, "require", lambda: versions.DESCRIBED)
        yield STAND_IN


@pytest.fixture(scope="session")
def described() -> ModuleType:
    """The module `described.py`: tests can't import one another."""
    file = Path(__file__).parent / "described.py"
    spec = importlib.util.spec_from_file_location("trtllm_described", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("trtllm") / "tiny", vocab_size=300)


@pytest.fixture(scope="module")
def replica(stand_in: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A started replica with two workers, TensorRT-LLM's own paths, a transport, and random weights.

    Each module has its own: what one does to it, up to killing its server, is none of another's affair.
    """
    run_directory = tmp_path_factory.mktemp("run")
    config = SharedMemoryConfig(name="shared_memory", timeout=60.0)
    ref = PluginRef(kind="weight_transport", name="shared_memory", config=config)
    transport: Any = make_plugin(ref, PluginContext(run_directory=run_directory))
    context = replica_context(
        tiny,
        run_directory,
        tokenizer=AutoTokenizer.from_pretrained(str(tiny)),
        transport=transport,
        weights_follow=True,
    )
    settings = TrtllmRolloutConfig(
        name="trtllm", mode="server", tensor_parallel_size=2, offload=True
    )
    rollout = TrtllmRollout(settings, context)
    rollout.start()
    yield rollout
    rollout.close()


@pytest.fixture
def config() -> Any:
    """Makes a config."""

    def make(**settings: Any) -> TrtllmRolloutConfig:
        return TrtllmRolloutConfig(name="trtllm", **settings)

    return make


@pytest.fixture
def context(tiny: Path, tmp_path: Path) -> Any:
    """Makes the context of a replica in a run."""

    return partial(replica_context, tiny, tmp_path)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    """A server that is none of ours."""
    with FakeServer() as server:
        yield server
