"""A fake `trtllm-serve`, a tiny model, and helpers for tests with replicas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_sdk.testing.replicas import replica_context
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer


@pytest.fixture(scope="session")
def trtllm_serve(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the program."""
    program = tmp_path_factory.mktemp("bin") / "trtllm-serve"
    code = Path(__file__).with_name("fake_trtllm_serve.py")
    program.write_text(f'#!/bin/sh\nOMP_NUM_THREADS=1 exec "{sys.executable}" "{code}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 model with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("trtllm") / "tiny", vocab_size=300)


@pytest.fixture
def config(trtllm_serve: str) -> Any:
    """Makes a config."""
    return partial(TrtllmRolloutConfig, name="trtllm", executable=trtllm_serve)


@pytest.fixture
def context(tiny: Path, tmp_path: Path) -> Any:
    """Makes the context of a replica in a run."""
    return partial(replica_context, tiny, tmp_path, tokenizer=AutoTokenizer.from_pretrained(tiny))


@pytest.fixture
def replica(config: Any, context: Any) -> Iterator[TrtllmRollout]:
    """A started replica."""
    rollout = TrtllmRollout(config(), context())
    rollout.start()
    yield rollout
    rollout.close()
