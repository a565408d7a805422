"""A tiny model, configs on it, and stand-ins for what SGLang lacks without an accelerator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.config.sections import ModelSection
from dovetail.interfaces import make_plugin
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.rollout import RolloutRequest, SamplingParams
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.transport import AdapterSpec, TensorSpec, WeightManifest
from dovetail.numerics.streams import SampleStream
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.fake_server import FakeServer
from dovetail_sdk.testing.replicas import replica_context
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_transports.config import SharedMemoryConfig

STAND_INS = Path(__file__).with_name("stand_ins")


class LowRank:
    """Low-rank adapters for tests, and what they do.

    Attributes:
        rank: of all adapters.
        alpha: of all adapters.
    """

    rank, alpha = 4, 8.0

    def request(self, n: int = 4, **sampling: Any) -> RolloutRequest:
        """A request of n samples with 8 tokens each after the prompt 5 … 11."""
        settings = {"max_new_tokens": 8, "ignore_eos": True, "log_probs": True, **sampling}
        return RolloutRequest(
            request_id="r",
            prompt_ids=np.arange(5, 12),
            sampling=SamplingParams(**settings),
            streams=tuple(SampleStream(seed=1, sample=sample) for sample in range(n)),
        )

    def adapter(
        self,
        plain: PlainModel,
        version: int,
        modules: Collection[str],
        *,
        rank_stabilised: bool = False,
        strength: float = 0.02,
    ) -> tuple[WeightManifest, dict[str, Tensor]]:
        """A random adapter of all layers whose names end in one of `modules`, another for every version.

        Returns:
            Its manifest, and by peft's names A [r, in] and B [out, r] of each layer, float32.
        """
        generator = torch.Generator().manual_seed(version)
        tensors: dict[str, Tensor] = {}
        for name, weight in plain.weights().items():
            path = name.removesuffix(".weight")
            if path.rpartition(".")[2] not in modules or path == name:
                continue
            rows, columns = weight.shape
            prefix = f"base_model.model.{path}"
            down = torch.randn(self.rank, columns, generator=generator)
            up = torch.randn(rows, self.rank, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = strength * up
        described = AdapterSpec(
            rank=self.rank,
            alpha=self.alpha,
            target_modules=tuple(sorted(modules)),
            rank_stabilised=rank_stabilised,
        )
        specs = tuple(
            TensorSpec(name=n, shape=tuple(t.shape), dtype="float32") for n, t in tensors.items()
        )
        manifest = WeightManifest(version=version, kind="adapter", tensors=specs, adapter=described)
        return manifest, tensors

    def merged(
        self, plain: PlainModel, manifest: WeightManifest, tensors: dict[str, Tensor]
    ) -> PlainModel:
        """The reference with W + s · B A in the adapted layers, s being alpha / r, or alpha / √r if rank-stabilised."""
        assert manifest.adapter is not None
        spec = manifest.adapter
        scale = spec.alpha / (spec.rank**0.5 if spec.rank_stabilised else spec.rank)
        model, weights = plain.changed(), plain.weights()
        with torch.no_grad():
            for name, parameter in model._model.named_parameters():
                parameter.copy_(weights[name])
                path = f"base_model.model.{name.removesuffix('.weight')}"
                if f"{path}.lora_A.weight" in tensors:
                    update = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
                    parameter.add_(scale * update)
        return model


@pytest.fixture(scope="session")
def low_rank() -> LowRank:
    """Low-rank adapters."""
    return LowRank()


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
    """Starts a replica on a real server; its weights come through shared memory.

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

    def start(**settings: Any) -> SglangRollout:
        run = tmp_path_factory.mktemp("run")
        ref = PluginRef(
            kind="weight_transport",
            name="shared_memory",
            config=SharedMemoryConfig(name="shared_memory", timeout=10.0),
        )
        transport = make_plugin(ref, PluginContext(run_directory=run))
        config = SglangRolloutConfig(
            name="sglang", max_model_len=4096, engine_args=arguments, **settled, **settings
        )
        engine = SglangRollout(config, replica_context(tiny, run, transport=transport, **here))
        engine.start()
        return engine

    return start
