"""The optimizer that the model's `optim` section names, over float32 weights or their shards, with a schedule that is a function of
the step, and gradient clipping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dovetail.errors import CheckpointError, NumericsError
from dovetail.sections import TrainingSection
from dovetail_torch_engines import (
    LearningRate,
    Ranks,
    build_optimizer,
    hidden_matrices,
    learning_rates,
    set_learning_rates,
)
from dovetail_train_fsdp2.shards import local


class ShardedOptimizer:
    """An optimizer over full or sharded parameters, with its learning-rate schedule and step counter."""

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module | None,
        training: TrainingSection,
        total_steps: int | None,
        ranks: Ranks | None = None,
        replicas: int = 1,
    ) -> None:
        """Construct the optimizer of all trained parameters.

        Args:
            model: the model; if it is sharded, its parameters are this rank's shards.
            head: the model's output layer.
            training: optimizer, schedule and clipping.
            total_steps: the number of the run's optimizer steps; None if unknown.
            ranks: the ranks that hold shards; by default one, which holds everything.
            replicas: how many ranks hold each shard.
        """
        self.steps = 0
        self._training = training
        self._ranks = ranks or Ranks(None, 0)
        self._replicas = replicas
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._rate = LearningRate(training.optim, total_steps)
        self._plugin = build_optimizer(training.optim)
        matrices = hidden_matrices(model, head) & self._named.keys()
        self._torch = self._plugin.build(self._named, matrices)
        self._peaks = learning_rates(self._torch)

    def step(self, finite: Tensor) -> tuple[float, float]:
        """Take one optimizer step with the accumulated gradients, then drop the gradients. Collective.

        Args:
            finite: bool [], whether the losses of these gradients are finite. Copied to the host together with the norm.

        Returns:
            The gradient's norm over all shards before clipping, and the scheduled learning rate; the same on every rank.

        Raises:
            NumericsError: the losses or the norm are not finite on some rank; weights and optimizer are unchanged on every rank.
        """
        lr = self._rate(self.steps)
        norm, finite_everywhere = self._clip(finite)
        if not finite_everywhere or not math.isfinite(norm):
            self.discard_gradients()
            what = f"gradient norm of optimizer step {self.steps} is {norm}"
            if not finite_everywhere:
                what = f"loss of optimizer step {self.steps}, or a model output that it is computed from, is not finite"
            raise NumericsError(
                f"the {what}; no step was taken",
                hint="lower the learning rate, and look at the loss, ratio and reward metrics of the steps before",
            )
        set_learning_rates(self._torch, [self._rate(self.steps, peak) for peak in self._peaks])
        for optimizer in self._torch:
            optimizer.step()
        self.discard_gradients()
        self.steps += 1
        return norm, lr

    def _clip(self, finite: Tensor) -> tuple[float, bool]:
        gradients = [local(p.grad) for p in self._named.values() if p.grad is not None]
        norm = (
            torch.nn.utils.get_total_norm(gradients)
            if gradients
            else finite.new_zeros((), dtype=torch.float32)
        )
        value, finite_here = torch.stack([norm, finite.to(norm)]).tolist()
        broken = float(not finite_here)
        if self._ranks.size > 1:
            # `replicas` ranks hold each shard, which counts once.
            squared, broken = self._ranks.sums([value**2 / self._replicas, broken])
            value = math.sqrt(squared) if squared >= 0 else math.nan
            norm = norm.new_tensor(value)
        if gradients and 0 < self._training.grad_clip < value < math.inf:
            factor = (self._training.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        return value, not broken

    def discard_gradients(self) -> None:
        """Drop the accumulated gradients, after an optimizer step or a failed backward pass."""
        for optimizer in self._torch:
            optimizer.zero_grad()

    def move(self, device: torch.device) -> None:
        """Move the optimizer's moments to a device."""
        for state in (state for o in self._torch for state in o.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's state tensors by name, such as `exp_avg.model.norm.weight`, without step counters.

        The tensors share the optimizer's memory. Most are float32 and have their parameter's shape.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for kind, value in self._state(parameter).items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                for part, tensor in self._plugin.state_tensors(local(value)).items():
                    key = ".".join(filter(None, (kind, part, name)))
                    found[key] = value if not part else _like(tensor, value)
        return found

    def parameter_steps(self) -> dict[str, float]:
        """Return the number of steps of each parameter with a state.

        An optimizer with a counter for each parameter counts only the steps in which the parameter has a gradient.
        """
        states = {name: self._state(parameter) for name, parameter in self._named.items()}
        return {
            name: float(state.get("step", self.steps)) for name, state in states.items() if state
        }

    def restore(self, steps: int, parameter_steps: Mapping[str, float]) -> None:
        """Restore the step counters, and create a state of zeros, which the caller fills through `moments`.

        An optimizer step with a gradient of 0 creates the state. Load the weights afterwards, so that this step can't affect them.

        Args:
            steps: the number of optimizer steps in total.
            parameter_steps: the number of steps by parameter name, as `parameter_steps` returns it.

        Raises:
            CheckpointError: the state belongs to another model or optimizer.
        """
        if unknown := sorted(parameter_steps.keys() - self._named.keys()):
            raise self._foreign(unknown[0])
        for optimizer in self._torch:
            optimizer.state.clear()
        # A step with gradients and learning rates of 0 creates the state of any optimizer without changing a weight.
        for name in parameter_steps:
            self._named[name].grad = torch.zeros_like(self._named[name])
        set_learning_rates(self._torch, [0.0] * len(self._peaks))
        for optimizer in self._torch:
            optimizer.step()
        self.discard_gradients()
        for name, step in parameter_steps.items():
            state = self._state(self._named[name])
            if not state:
                raise self._foreign(name)
            if "step" in state:
                state["step"].fill_(step)
        self.steps = steps

    def _foreign(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint has an optimizer state for the parameter {name!r}, for which this run's optimizer keeps none",
            hint="resume with the model and the optimizer that the checkpoint was made with",
        )

    def _state(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        states = (o.state[parameter] for o in self._torch if parameter in o.state)
        return next(states, {})


def _like(part: Tensor, whole: Tensor) -> Tensor:
    """Return `part` as a DTensor with the mesh and placements of `whole`; unchanged if `whole` is not a DTensor."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False)
