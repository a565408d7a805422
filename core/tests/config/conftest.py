"""Config classes of a few plugins, found without any being installed."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from dovetail.config import config_from_mapping, load_config
from dovetail.config.load import LoadedConfig
from dovetail.errors import ConfigError, PluginNotFoundError, nearest
from dovetail.sections import (
    VERBATIM,
    EngineSection,
    OptimSection,
    PluginSection,
    RolloutSection,
    RuntimeSection,
    TrainerSection,
    plugin_field,
)
from dovetail_torch_engines import LoraSection


@attrs.frozen(kw_only=True)
class HfConfig(RolloutSection):
    chunk_size: int = 16
    """Sequences decoded together."""


@attrs.frozen(kw_only=True)
class VllmConfig(RolloutSection):
    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Devices a replica."""
    gpu_memory_utilization: float = 0.5
    """Share of memory."""
    engine_args: dict[str, Any] = attrs.field(factory=dict)
    """Passed on."""


@attrs.frozen(kw_only=True)
class FsdpConfig(EngineSection):
    lora: LoraSection | None = None
    """Adapters."""


@attrs.frozen(kw_only=True)
class AdamWConfig(OptimSection):
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays."""
    eps: float = 1e-8
    """Added."""


@attrs.frozen(kw_only=True)
class ClipConfig(PluginSection):
    clip_low: float = 0.2
    """Below one."""
    clip_high: float = 0.2
    """Above one."""

    def __attrs_post_init__(self) -> None:
        if self.clip_low > self.clip_high:
            raise ValueError("clip_low is larger than clip_high")
        if self.clip_high >= 1:
            raise ConfigError("clip_high allows any ratio", hint="set it below 1")


@attrs.frozen(kw_only=True)
class WrapConfig(PluginSection):
    """A reward manager that runs inside another one."""

    inner: PluginSection = plugin_field("reward_manager", "naive")
    """What it wraps."""
    mode: Literal["fast", "exact"] = "fast"
    """How."""
    limit: int | str = 1
    """A number, or `auto`."""
    options: dict[str, Any] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Passed on."""


CLASSES: dict[str, dict[str, type]] = {
    "rollout": {"hf": HfConfig, "vllm": VllmConfig},
    "engine": {"fsdp2": FsdpConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": OptimSection},
    "trainer": {"on_policy": TrainerSection},
    "runtime": {"inline": RuntimeSection},
    "policy_loss": {"ppo_clip": ClipConfig, "reinforce": PluginSection},
    "advantage": {"grpo": PluginSection, "rloo": PluginSection},
    "reward_manager": {"naive": PluginSection, "wrap": WrapConfig},
    "tracker": dict.fromkeys(("console", "jsonl", "tensorboard"), PluginSection),
}


def find_class(kind: str, section: Mapping[str, Any]) -> type:
    if section.get("path"):
        return PluginSection
    name = str(section["name"])
    if kind not in CLASSES:
        return PluginSection
    if name not in CLASSES[kind]:
        raise PluginNotFoundError(
            f"no {kind} plugin is named {name!r}",
            hint=f"did you mean {nearest(name, CLASSES[kind])!r}?",
        )
    return CLASSES[kind][name]


MINIMAL: dict[str, Any] = {"model": {"path": "tiny"}}


def with_model(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {**MINIMAL, **mapping}


@pytest.fixture
def build() -> Callable[..., LoadedConfig]:
    """Build a config from sections (a model is added) and overrides."""

    def build(mapping: Mapping[str, Any] | None = None, *overrides: str) -> LoadedConfig:
        return config_from_mapping(with_model(mapping or {}), overrides, resolver=find_class)

    return build


@pytest.fixture
def problems(build: Callable[..., LoadedConfig]) -> Callable[..., tuple[str, ...]]:
    """Everything that is wrong with sections and overrides."""

    def problems(mapping: Mapping[str, Any] | None = None, *overrides: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            build(mapping, *overrides)
        assert all(
            problem.splitlines()[0] in str(caught.value) for problem in caught.value.problems
        )
        return caught.value.problems

    return problems


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """Load YAML texts, written as a.yaml, b.yaml, …, later ones over earlier ones."""

    def load(*texts: str, overrides: tuple[str, ...] = ()) -> LoadedConfig:
        paths = [tmp_path / f"{name}.yaml" for name, _ in zip("abcdef", texts, strict=False)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        return load_config(paths, overrides, resolver=find_class)

    return load


@pytest.fixture
def fake_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the plugins of this file."""
    monkeypatch.setattr("dovetail.config.load.installed_config_class", find_class)


@pytest.fixture
def lookup() -> Callable[[str, Mapping[str, Any]], type]:
    return find_class
