"""MegatronAdapter: low-rank adapters over a model divided among ranks. The frozen base is the reference policy.

Names, shapes and initial values equal those of the engine `fsdp2`, so that either engine reads the other's states and tensors. A is
drawn from the seed, layer by layer; the initial B is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.interfaces import AdapterSpec
from dovetail_torch_engines import MAGNITUDE, LoraSection, described, drawn_a, state_name
from dovetail_train_megatron.low_rank import LowRankUpdate
from dovetail_train_megatron.magnitudes import Magnitudes
from dovetail_train_megatron.targets import chosen, linear_layers, places

if TYPE_CHECKING:
    from dovetail_train_megatron.network import Network


class MegatronAdapter:
    """The low-rank adapter of one rank's modules.

    Attributes:
        section: the adapter's settings: rank, scale, layers, and what a weight update sends.
    """

    def __init__(self, network: Network, section: LoraSection, *, seed: int) -> None:
        """Add low-rank updates to the layers that the section names, and freeze everything else but a value head.

        Args:
            network: the network; its weights need not be loaded yet.
            section: rank, scale and layers.
            seed: the seed of the matrices A; torch's random state is not changed.

        Raises:
            ConfigError: the model has no such layers, they can't be adapted, or a pipeline stage has none of them.
        """
        self.section = section
        architecture, parallel = network.architecture, network.parallel
        every = linear_layers(architecture)
        self._adapted = chosen(section, every, architecture)
        self._updates: dict[int, LowRankUpdate] = {}
        self._magnitudes: dict[int, Magnitudes] = {}
        for name, parameter in network.module.named_parameters():
            parameter.requires_grad_(requires_grad=name.startswith("value_head."))
        for layer in network.module.decoder.layers:
            for place in places(layer, architecture, parallel.tp):
                names = [n.name for n in place.linears if n.name in self._adapted]
                if not names:
                    continue
                updates = LowRankUpdate(
                    place.linears,
                    names,
                    place.fuse,
                    rank=section.rank,
                    scale=section.scale,
                    divided=place.divided,
                    ranks=parallel.tp,
                    sequence_parallel=bool(architecture.transformer.sequence_parallel),
                    device=network.device,
                )
                magnitudes = None
                if section.dora:
                    group = parallel.tp_group if parallel.tp > 1 else None
                    magnitudes = Magnitudes(updates, place.module, group)
                    self._magnitudes[id(place.module.weight)] = magnitudes
                self._updates[id(place.module.weight)] = updates
                _attach(place.module, updates, magnitudes)
        if not self._updates:
            raise ConfigError(
                f"lora.target_modules=[{', '.join(section.target_modules)}] names no layer of pipeline stage {parallel.pp_rank}; "
                "expected at least one layer in each stage",
                hint="name layers of every stage, or set pipeline_parallel_size=1",
            )
        _let_gradients_start(network)
        self._draw(network, every, seed)

    def start(self) -> None:
        """Set DoRA's initial magnitudes from the base's weights, after these are loaded; without DoRA, do nothing. Collective."""
        for magnitudes in self._magnitudes.values():
            magnitudes.start()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapter off within the block, so that passes run the base model alone."""
        for updates in self._updates.values():
            updates.on = False
        try:
            yield
        finally:
            for updates in self._updates.values():
                updates.on = True

    def merged(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a weight, [out, in], with the adapter's update added; return parameters without an adapter unchanged.

        The sum is computed in float32 and returned in the weight's dtype. Collective over tensor-parallel ranks with DoRA.
        """
        updates = self._updates.get(id(parameter))
        weight = parameter.detach()
        if updates is None:
            return weight
        merged = weight.float() + updates.update()
        if (magnitudes := self._magnitudes.get(id(parameter))) is not None:
            merged = merged * magnitudes.factor()[:, None]
        return merged.detach().to(weight.dtype)

    def tensors(self) -> Mapping[str, nn.Parameter]:
        """Return this rank's shards of A, B and magnitudes, by their names in training states."""
        vectors = {
            state_name(name, MAGNITUDE): vector
            for magnitudes in self._magnitudes.values()
            for name, vector in magnitudes.vectors().items()
        }
        return vectors | {
            state_name(name, f"lora_{kind}"): matrix
            for updates in self._updates.values()
            for name, pair in updates.matrices().items()
            for kind, matrix in zip("AB", pair, strict=True)
        }

    def described(self) -> AdapterSpec:
        """Return the description that a rollout engine needs to apply the adapter's tensors."""
        return described(self.section, self._adapted)

    def _draw(self, network: Network, every: Mapping[str, int], seed: int) -> None:
        """Fill this rank's shards of every A. Every rank draws every A as a whole, so that values do not depend on the layout.

        Args:
            network: the network, with this rank's place in the layout.
            every: the number of input features by layer name, for all linear layers of the model in a fixed order.
            seed: the seed of the matrices A.
        """
        parallel = network.parallel
        own = self.tensors()
        generator = torch.Generator().manual_seed(seed)
        for name, inputs in every.items():
            if name not in self._adapted:
                continue
            start = drawn_a(self.section.rank, inputs, generator)
            mine = own.get(state_name(name, "lora_A"))
            if mine is None:
                continue
            if mine.shape[1] != inputs:
                start = start.chunk(parallel.tp, dim=1)[parallel.tp_rank]
            with torch.no_grad():
                mine.copy_(start)


def _attach(base: nn.Module, updates: LowRankUpdate, magnitudes: Magnitudes | None) -> None:
    """Make a layer of Megatron add the low-rank updates to its output."""

    def added(_: nn.Module, given: tuple[Any, ...], found: tuple[Tensor, Any]) -> Any:
        if not updates.on:
            return found
        output, bias = found
        update = updates(given[0])
        if magnitudes is not None:
            return magnitudes.applied(output, update), bias
        return output + update, bias

    base.low_rank = updates
    if magnitudes is not None:
        base.magnitudes = magnitudes
    base.register_forward_hook(added)


def _let_gradients_start(network: Network) -> None:
    """Make the embedding's output require a gradient: recomputation of whole layers computes gradients only for such inputs."""
    if not network.parallel.first_stage:
        return
    if network.architecture.transformer.recompute_granularity != "full":
        return

    def required(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        return embedded.requires_grad_() if torch.is_grad_enabled() else embedded

    network.module.embedding.register_forward_hook(required)
