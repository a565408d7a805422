"""PeftAdapter: LoRA on a model through peft (arXiv 2106.09685). The frozen base is the reference policy.

A layer's weight becomes W + s · B A, with A [rank, in] initialised at random, B [out, rank] with 0, and s = alpha / rank (alpha /
√rank if rank-stabilised, arXiv 2312.03732). With DoRA (arXiv 2402.09353) the weight becomes m ⊙ (W + s · B A) / ‖W + s · B A‖, by
rows, with m [out] initialised with ‖W‖. Only A, B and m are trained, in float32.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError, PluginNeedsError
from dovetail.interfaces import AdapterSpec
from dovetail_datasets import has_matrix
from dovetail_torch_engines import (
    ADAPTER,
    ALL_LINEAR,
    MAGNITUDE,
    LoraSection,
    adapter_tensors,
    described,
    drawn_a,
    no_matrix,
    shared_weight,
    wire_name,
)
from dovetail_train_fsdp2.shards import fill, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "base_layer."
"""The name under which peft keeps the layer that it wraps."""


class PeftAdapter:
    """Adds low-rank layers to one model, and reads, initialises and merges them.

    Attributes:
        section: the adapter's settings: rank, scale, layers, and what a weight update sends.
    """

    def __init__(self, model: PreTrainedModel, section: LoraSection, *, seed: int) -> None:
        """Wrap the layers that the section names, in place, and freeze everything else.

        Args:
            model: the model; its other weights do not change. If they are on the meta device, so is the adapter: call `reset` once
                both have memory.
            section: rank, scale and layers.
            seed: the seed of the matrices A; torch's random state is not changed.

        Raises:
            PluginNeedsError: peft is not installed.
            ConfigError: the model has no such layers, or one of them can't be adapted.
        """
        self.section = section
        self._seed = seed
        self._layers = _inject(model, section)
        _check_layers(model, self._layers)
        self._by_weight = {f"{prefix}.weight": layer for prefix, layer in self._layers.items()}
        if model.device.type != "meta":
            self.reset()

    def reset(self) -> None:
        """Load the adapter of `lora.adapter_path`, or initialise A from the seed and B with 0. Collective with DoRA.

        A is the same on any number of ranks.

        Raises:
            ConfigError: the adapter does not match the section, or belongs to another model.
            CheckpointError: the adapter's files can't be read.
        """
        if self.section.adapter_path is not None:
            own = self.tensors()
            stored = adapter_tensors(self.section, {name: t.shape for name, t in own.items()})
            for name, parameter in own.items():
                start = stored[name]
                fill(parameter, lambda first, last, start=start: start[first:last])  # type: ignore[misc]
            return
        generator = torch.Generator().manual_seed(self._seed)
        for layer in self._layers.values():
            for name, parameter in _own(layer).items():
                kind = name.partition(".")[0]
                start = torch.zeros(tuple(parameter.shape))
                if kind == "lora_A":
                    rank, inputs = parameter.shape
                    start = drawn_a(rank, inputs, generator)
                elif kind == "lora_embedding_B":
                    nn.init.normal_(start, generator=generator)
                elif kind == MAGNITUDE:
                    weight = whole(layer.get_base_layer().weight).float()
                    start = _norms(weight, layer)
                fill(parameter, lambda first, last, start=start: start[first:last])  # type: ignore[misc]

    def to_cpu(self) -> None:
        """Allocate uninitialised adapter tensors on the CPU, for a model on the meta device."""
        for layer in self._layers.values():
            for name, module in layer.named_children():
                if name != BASE.removesuffix("."):
                    module.to_empty(device="cpu")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapter off within the block, so that passes run the base model alone. Not for passes with gradients."""
        # peft's own switch also changes `requires_grad` of parameters, which must stay fixed once they are sharded.
        for layer in self._layers.values():
            layer._disable_adapters = True  # noqa: SLF001 - see above
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False  # noqa: SLF001 - see above

    def base_name(self, name: str) -> str | None:
        """Return the name of a tensor in the model without the adapter; None for the adapter's own tensors."""
        for prefix in self._layers:
            if name.startswith(f"{prefix}."):
                inner = name.removeprefix(f"{prefix}.")
                return f"{prefix}.{inner.removeprefix(BASE)}" if inner.startswith(BASE) else None
        return name

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a base weight with the adapter's update added, float32; return any other tensor unchanged.

        No tensor is changed in place. Collective if the adapter is sharded.

        Args:
            name: the name of the weight in the model without the adapter.
            weight: the unsharded weight, on any device: [out, in] for an adapted layer ([in, out] if the model stores that), else
                any shape.
        """
        layer = self._by_weight.get(name)
        if layer is None:
            return weight
        own = {
            key.partition(".")[0]: whole(tensor, weight.device)
            for key, tensor in _own(layer).items()
        }
        a = own["lora_A"] if "lora_A" in own else own["lora_embedding_A"]
        b = own["lora_B"] if "lora_B" in own else own["lora_embedding_B"]
        update = b.float() @ a.float()
        scale: float = layer.scaling[ADAPTER]
        merged: Tensor = weight.float() + (update.T if _transposed(layer) else update) * scale
        if MAGNITUDE not in own:
            return merged
        factor = own[MAGNITUDE].float() / _norms(merged, layer)
        return merged * (factor if _transposed(layer) else factor[:, None])

    def described(self) -> AdapterSpec:
        """Return the description that a rollout engine needs to apply the adapter's tensors."""
        return described(self.section, self._layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by their names in peft's checkpoints: A [r, in], B [out, r], and magnitudes [out] with DoRA.

        Tensors of a sharded model are DTensors.
        """
        return {
            wire_name(f"{prefix}.{name}"): tensor
            for prefix, layer in self._layers.items()
            for name, tensor in _own(layer).items()
        }


def narrow_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert frozen linear layers once to the dtype to which autocast would convert them at every pass.

    Layers with weights that the dtype can't represent exactly are not converted.

    Args:
        model: a model with an adapter; afterwards, run it under autocast only. Its output layer is unchanged.
        dtype: the compute dtype.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module is head or module.weight is embedding:
            continue
        own = list(module.parameters(recurse=False))
        if not any(p.requires_grad or not torch.equal(p.to(dtype).float(), p) for p in own):
            module.to(dtype)


def _own(layer: Any) -> dict[str, Tensor]:
    """Return the adapter's parameters in one layer, by names such as `lora_A.default.weight`."""
    return {
        name: parameter for name, parameter in layer.named_parameters() if not name.startswith(BASE)
    }


def _transposed(layer: Any) -> bool:
    """Return whether the base stores its weight as [in, out], as embeddings and GPT-2's layers do."""
    return bool(getattr(layer, "fan_in_fan_out", False)) or isinstance(
        layer.get_base_layer(), nn.Embedding
    )


def _norms(weight: Tensor, layer: object) -> Tensor:
    """Return the norm of each output's weights, [out]."""
    return torch.linalg.norm(weight, dim=0 if _transposed(layer) else 1)


def _inject(model: PreTrainedModel, section: LoraSection) -> dict[str, Any]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise PluginNeedsError(
            f"lora needs the package peft, which can't be imported here: {error}",
            hint="pip install 'dovetail-train-fsdp2[lora]'",
        ) from error
    from transformers.pytorch_utils import Conv1D

    known = (nn.Linear, Conv1D)
    linear = [name for name, m in model.named_modules() if isinstance(m, known)]
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=_targets(model, section, linear),
        use_rslora=section.rank_stabilised,
        use_dora=section.dora,
        lora_dropout=0.0,
        bias="none",
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # What peft warns of is handled here or checked below.
        warnings.filterwarnings("ignore", module="peft")
        try:
            # An adapter on the meta device is initialised once it has memory, so that peft need not do it.
            empty = model.device.type == "meta"
            inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=empty)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules=[{', '.join(section.target_modules)}] does not fit the model: "
                f"{str(error).partition(chr(10))[0]}",
                hint=_choice(linear),
            ) from error
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def _targets(
    model: PreTrainedModel, section: LoraSection, linear: Sequence[str]
) -> str | list[str]:
    """Return the target modules for peft, with every name checked: peft ignores names without a match if another name matches."""
    out = section.exclude_modules
    if section.target_modules == (ALL_LINEAR,) and out is None:
        return ALL_LINEAR
    modules = dict(model.named_modules())
    targets = [target for target in section.target_modules if target != ALL_LINEAR]
    # A section that actor and critic share may name layers that a critic's trunk lacks. If all are missing, peft raises an error.
    whole = model.get_output_embeddings() is not None
    reached = []
    for target in targets:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        if whole and not named:
            raise ConfigError(
                f"lora.target_modules names {target!r}, but the model has no module of that name",
                hint=_choice(linear),
            )
        for name in named:
            if not has_matrix(modules[name]):
                raise no_matrix(target, name, linear)
        reached += named
    head = model.get_output_embeddings()
    if ALL_LINEAR in section.target_modules:
        reached += [name for name in linear if model.get_submodule(name) is not head]
    found = [name for name in reached if not (out and re.fullmatch(out, name))]
    if reached and not found:
        raise ConfigError(
            f"lora.exclude_modules={out!r} excludes every layer that lora.target_modules names",
            hint=f"exclude fewer layers, or {_choice(linear)}",
        )
    return found


def _choice(linear: Iterable[str]) -> str:
    names = sorted({name.rpartition(".")[2] for name in linear})
    return f"set lora.target_modules to {ALL_LINEAR}, or to some of: {', '.join(names)}"


def _check_layers(model: PreTrainedModel, layers: dict[str, Any]) -> None:
    """Check that every update can be merged into a matrix that belongs to its layer alone."""
    names = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    for name, layer in layers.items():
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None:
            raise ConfigError(
                f"lora.target_modules includes {name!r}, which can't be adapted: one tensor holds the weights of all experts",
                hint="name the layers to adapt one by one, such as [q_proj, k_proj, v_proj, o_proj]",
            )
        if names[id(weight)] > 1:
            raise shared_weight(name)
