"""Megatron's distributed optimizer. Float32 weights and moments are divided over the ranks that hold copies of a parameter.
Gradients are reduced to the rank that owns a shard, and updated weights are gathered from that rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.errors import NumericsError
from dovetail.sections import TrainingSection
from dovetail_torch_engines import LearningRate, Ranks, build_optimizer
from dovetail_train_megatron.needs import imported
from dovetail_train_megatron.network import Network

OPTIMIZERS = frozenset({"adamw", "sgd"})
"""The supported optimizers. They must update each element independently, since Megatron divides parameters at any element."""


class MegatronOptimizer:
    """Megatron's distributed optimizer of one network, with its learning-rate schedule and step counter.

    Attributes:
        module: the network's module in Megatron's wrapper for distributed data parallelism.
        steps: the number of steps taken so far.
    """

    def __init__(
        self,
        network: Network,
        training: TrainingSection,
        total_steps: int | None,
        ranks: Ranks,
        *,
        overlap: bool,
    ) -> None:
        """Construct the optimizer of all the network's parameters, which move to one buffer. Collective.

        Args:
            network: the network, with its weights loaded.
            training: optimizer, schedule and clipping.
            total_steps: the number of the run's optimizer steps; None if unknown.
            ranks: all ranks of the mesh.
            overlap: whether to reduce gradients while others are still computed.
        """
        self.steps = 0
        self._training, self._ranks = training, ranks
        self._rate = LearningRate(training.optim, total_steps)
        # Any, because the config class is AdamW's or SGD's.
        self._optim: Any = build_optimizer(training.optim).config
        self._network = network
        self._half = network.architecture.dtype != torch.float32
        distributed = imported("megatron.core.distributed")
        transformer = network.architecture.transformer
        self.module = distributed.DistributedDataParallel(
            transformer,
            distributed.DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                average_in_collective=False,
            ),
            network.module,
        )

        def finalize(model: object, _: object = None, **options: object) -> None:
            # No number of tokens is passed: the loss is already divided by its denominators.
            distributed.finalize_model_grads(model, None, **options)

        transformer.finalize_model_grads_func = finalize
        transformer.no_sync_func = self.module.no_sync if overlap else None
        self._megatron = self._made()
        if self._optim.name == "sgd":
            for part in self._parts():
                part.optimizer = _descent(part.optimizer.param_groups, self._optim)

    def begin(self) -> None:
        """Set all gradients to 0 before a mini-batch."""
        self.module.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, finite: bool) -> tuple[float, float]:
        """Take one optimizer step with the accumulated gradients. Collective over all ranks.

        Args:
            finite: whether the losses on this rank are finite.

        Returns:
            The gradient's norm over all ranks before clipping, with each parameter counted once, and the learning rate.

        Raises:
            NumericsError: the losses or the norm are not finite on some rank; weights and optimizer are unchanged on every rank.
        """
        lr = self._rate(self.steps)
        self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        (broken,) = self._ranks.sums([float(not finite)])
        if broken or not math.isfinite(norm):
            self.discard_gradients()
            what = f"gradient norm of optimizer step {self.steps} is {norm}"
            if broken:
                what = f"loss of optimizer step {self.steps}, or a model output that it is computed from, is not finite"
            raise NumericsError(
                f"the {what}; no step was taken",
                hint="lower the learning rate, and look at the loss, ratio and reward metrics of the steps before",
            )
        clip = self._training.grad_clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for group in self._megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._optim.weight_decay
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if factor < 1 and gradients:
                torch._foreach_mul_(gradients, factor)
        self._megatron.step_with_ready_grads()
        self.steps += 1
        return norm, lr

    def discard_gradients(self) -> None:
        """Drop the gradients of a failed backward pass."""
        self.begin()

    def masters(self, parameter: nn.Parameter) -> tuple[Tensor, dict[str, Tensor], slice] | None:
        """Return this rank's shard of a parameter in the optimizer; None if the rank owns no shard of it.

        Returns:
            The float32 weights, [n]; the optimizer's state by name, such as the moments, [n] each; and the shard's range in the
            flattened parameter.
        """
        for part in self._parts():
            if parameter in part.model_param_group_index_map:
                place = part._get_model_param_range_map(parameter)["param"]  # noqa: SLF001
                group, order = part.model_param_group_index_map[parameter]
                main: Tensor = part.optimizer.param_groups[group]["params"][order]
                return main, part.optimizer.state[main], slice(place.start, place.end)
        return None

    def whole(self, parameter: nn.Parameter, kind: str, *, expert: bool) -> Tensor:
        """Return a parameter's float32 weights or one of its moments, in the parameter's shape. Collective over the parameter's copies.

        Args:
            parameter: a parameter of the network.
            kind: `weight`, or the name of a moment.
            expert: whether the parameter belongs to an expert.
        """
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if (found := self.masters(parameter)) is not None:
            main, state, place = found
            piece = main if kind == "weight" else state.get(kind)
            if piece is not None:
                flat[place] = piece.detach().float().flatten().to(flat.device)
        group = self._network.parallel.replicas(expert=expert)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(flat, group=group)
        return flat.view(parameter.shape)

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, kind: str, values: Tensor) -> None:
        """Restore this rank's shard of weights or moments from a tensor that `whole` returned, in the parameter's shape."""
        if (found := self.masters(parameter)) is None:
            return
        main, state, place = found
        piece = values.flatten()[place].to(main.device, torch.float32)
        if kind == "weight":
            main.copy_(piece)
        else:
            state[kind] = piece.clone()

    def restore(self, steps: int) -> None:
        """Restore the step counter, and set all moments to 0; call `fill` afterwards to restore the moments."""
        self.steps = steps
        for part in self._parts():
            part.optimizer.state.clear()
            if not steps or not self.kinds:
                continue
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    moments = {k: torch.zeros_like(main) for k in self.kinds}
                    counter = torch.tensor(float(steps), dtype=torch.float32)
                    part.optimizer.state[main] = {"step": counter, **moments}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the moments that the optimizer keeps for a parameter."""
        if self._optim.name == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._optim.momentum else ()

    @property
    def half(self) -> bool:
        """Whether the modules hold copies of the float32 weights in half precision."""
        return self._half

    def states(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each float32 weight of this rank's shards, [n], with the inner optimizer that holds its state."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    yield part.optimizer, main

    def _parts(self) -> list[Any]:
        return list(getattr(self._megatron, "chained_optimizers", [self._megatron]))

    def _made(self) -> Any:
        optimizers = imported("megatron.core.optimizer")
        optim = self._optim
        adam = optim.name == "adamw"
        config = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0] if adam else 0.9,
            adam_beta2=optim.betas[1] if adam else 0.999,
            adam_eps=optim.eps if adam else 1e-8,
            decoupled_weight_decay=True,
            clip_grad=self._training.grad_clip,
            bf16=self._half,
            params_dtype=self._network.architecture.dtype,
            use_distributed_optimizer=True,
        )
        quiet = logging.getLogger("megatron.core.optimizer")
        level, quiet.level = quiet.level, logging.WARNING
        try:
            return optimizers.get_megatron_optimizer(
                config, [self.module], use_gloo_process_groups=False
            )
        finally:
            quiet.setLevel(level)


def _descent(groups: list[dict[str, Any]], optim: Any) -> torch.optim.SGD:
    """Return an SGD optimizer for the parameter groups that Megatron made for Adam, since Megatron divides weights only for Adam.

    The groups are set after construction, because torch refuses views, such as Megatron's shards of float32 parameters.
    """
    descent = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)],
        lr=optim.lr,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
    )
    descent.param_groups = [{**group, **descent.defaults} for group in groups]
    return descent
