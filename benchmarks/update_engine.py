"""One rank's engine as the update benchmarks start it, and the device that it computes on."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs


def settings_of(run: str) -> dict[str, Any]:
    """`key=value` words as JSON values, or as strings where they are none."""
    settings = {}
    for word in run.split():
        key, _, value = word.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def make_engine(model: Path, settings: dict[str, Any], rank: int, ranks: int, device: str) -> Any:
    """The engine of one rank, started."""
    from dovetail.dispatch import Mesh
    from dovetail.interfaces import PluginContext
    from dovetail.sections import ModelSection, TrainingSection
    from dovetail.workers import reduction_over

    def part(kind: type, **given: Any) -> Any:
        names = {field.name for field in attrs.fields(kind)}
        return kind(**given, **{k: settings.pop(k) for k in sorted(names & settings.keys())})

    settings = dict(settings)
    config_class, engine_class = classes_of(settings.pop("engine", "fsdp2"))
    if "lora" in settings:
        from dovetail_torch_engines import LoraSection

        settings["lora"] = LoraSection(**settings["lora"])
    config, training = part(config_class), part(TrainingSection)
    dtype = settings.pop("dtype", "float32" if device == "cpu" else "bfloat16")
    section = part(ModelSection, path=str(model), dtype=dtype)
    if settings:
        raise SystemExit(f"no section has {', '.join(settings)}")
    mesh = Mesh.over(ranks, **config.mesh_axes())
    context = PluginContext(
        role="actor", seed=1, model=section, training=training, total_steps=1000, mesh=mesh,
        rank=rank, device=device, reduction=reduction_over(mesh, rank),
    )  # fmt: skip
    engine = engine_class(config, context)
    engine.start()
    return engine


def classes_of(engine: str) -> tuple[type, type]:
    """An engine's config class and its own."""
    if engine == "megatron":
        from dovetail_train_megatron.config import MegatronConfig
        from dovetail_train_megatron.engine import MegatronEngine

        return MegatronConfig, MegatronEngine
    from dovetail_train_fsdp2.config import Fsdp2Config
    from dovetail_train_fsdp2.engine import Fsdp2Engine

    return Fsdp2Config, Fsdp2Engine


class Device:
    """What differs between an accelerator and a CPU: waiting for it, and its memory; and what other ranks measure."""

    def __init__(self, name: str) -> None:
        import torch

        self.name, self._torch = name, torch
        self.accelerated = name != "cpu"

    def wait(self) -> None:
        """Until everything that was started is done."""
        if self.accelerated:
            self._torch.accelerator.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call takes on the slowest rank, from when all begin it until the device has done its work."""
        self.wait()
        if self._torch.distributed.is_initialized():
            self._torch.distributed.barrier()
        begun = time.perf_counter()
        call()
        self.wait()
        return self.largest({"seconds": time.perf_counter() - begun})["seconds"]

    def largest(self, own: dict[str, float]) -> dict[str, float]:
        """Of every figure the largest rank's."""
        dist = self._torch.distributed
        if not dist.is_initialized():
            return own
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return {name: max(rank[name] for rank in gathered) for name in own}

    def clear(self) -> None:
        """Forget what was freed, and the peak."""
        gc.collect()
        if self.accelerated:
            self._torch.accelerator.empty_cache()
            self._torch.accelerator.reset_peak_memory_stats()

    def held_gib(self) -> float:
        """What tensors hold now."""
        if not self.accelerated:
            return 0.0
        return round(self._torch.accelerator.memory_allocated() / 2**30, 2)

    def peak_gib(self) -> dict[str, float]:
        """Peaks since `clear`, of what tensors held and of what the allocator held."""
        if not self.accelerated:
            return {}
        accelerator = self._torch.accelerator
        return {
            "peak_gib": round(accelerator.max_memory_allocated() / 2**30, 2),
            "peak_reserved_gib": round(accelerator.max_memory_reserved() / 2**30, 2),
        }
