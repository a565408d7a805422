"""The optimizer: AdamW or plain gradient descent over float32 weights, a schedule that is a function of the step, and
gradient clipping; on shards where the model is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dovetail.errors import CheckpointError, NumericsError
from dovetail.sections import OptimSection, TrainingSection
from dovetail.training import Ranks, learning_rate
from dovetail_train_fsdp2.shards import local


class ShardedOptimizer:
    """One optimizer with its place in the schedule.

    AdamW (arXiv 1711.05101), or gradient descent without momentum: w ← w − lr · (g + weight_decay · w), whose decay
    is decoupled as AdamW's is, since g is clipped before.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingSection,
        total_steps: int | None,
        ranks: Ranks | None = None,
        replicas: int = 1,
    ) -> None:
        """Take every parameter that is trained.

        Args:
            model: where sharded, with its parameters in shards.
            training: optimizer, schedule and clipping.
            total_steps: optimizer steps of the run, where they are known.
            ranks: those that hold shards; by default there is one, which holds everything.
            replicas: how many ranks hold each shard.
        """
        self.steps = 0
        self._training = training
        self._total_steps = total_steps
        self._ranks = ranks or Ranks(None, 0)
        self._replicas = replicas
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._torch = _made(training.optim, list(self._named.values()))

    def step(self, finite: Tensor) -> tuple[float, float]:
        """Take exactly one step with the gradients that have gathered, and drop them. Collective.

        Args:
            finite: bool [], whether the losses that they come from are finite. It is fetched with the norm.

        Returns:
            The gradient's norm before clipping, over all shards, and the learning rate; the same on every rank.

        Raises:
            NumericsError: the losses or the norm are not finite, on some rank; on every rank weights and optimizer are
                as before.
        """
        lr = learning_rate(self._training.optim, self.steps, self._total_steps)
        norm, finite_everywhere = self._clip(finite)
        if not finite_everywhere or not math.isfinite(norm):
            self._torch.zero_grad()
            what = f"gradient norm of optimizer step {self.steps} is {norm}"
            if not finite_everywhere:
                what = f"loss of optimizer step {self.steps}, or an output of the model that it is made of, is not finite"
            raise NumericsError(
                f"the {what}; no step was taken",
                hint="lower the learning rate, and look at the loss, ratio and reward metrics of the steps before",
            )
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self._torch.zero_grad()
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
            squared, broken = self._ranks.sums([value**2 / self._replicas, broken])
            value = math.sqrt(squared) if squared >= 0 else math.nan
            norm = norm.new_tensor(value)
        if gradients and 0 < self._training.grad_clip < value < math.inf:
            factor = (self._training.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        return value, not broken

    def discard_gradients(self) -> None:
        """Drop what a failed backward pass has left."""
        self._torch.zero_grad()

    def move(self, device: torch.device) -> None:
        """Move the moments to a device."""
        for state in self._torch.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    def moments(self) -> dict[str, Tensor]:
        """The moments by `kind.parameter`, such as `exp_avg.model.norm.weight`, each float32 and of its parameter's shape; they
        share the optimizer's memory.
        """
        return {
            f"{kind}.{name}": value
            for name, parameter in self._named.items()
            for kind, value in self._torch.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim()
        }

    def parameter_steps(self) -> dict[str, float]:
        """How many steps each parameter with moments has taken: those in which it had a gradient."""
        return {
            name: float(self._torch.state[parameter]["step"])
            for name, parameter in self._named.items()
            if "step" in self._torch.state.get(parameter, {})
        }

    def restore(self, steps: int, parameter_steps: Mapping[str, float]) -> None:
        """Go back to a step, with moments of 0 that the caller then fills through `moments`.

        Raises:
            CheckpointError: the state belongs to another model or optimizer.
        """
        unknown = sorted(parameter_steps.keys() - self._named.keys())
        kinds = KINDS[self._training.optim.optimizer]
        if unknown or (parameter_steps and not kinds):
            found = unknown[0] if unknown else min(parameter_steps)
            raise CheckpointError(
                f"the optimizer state is of another model or optimizer: it holds {found!r}",
                hint="resume with the model and the optimizer that the checkpoint was made with",
            )
        self._torch.state.clear()
        for name, step in parameter_steps.items():
            parameter = self._named[name]
            empty = {kind: torch.zeros_like(parameter) for kind in kinds}
            counter = torch.tensor(step, dtype=torch.float32, device=local(parameter).device)
            self._torch.state[parameter] = {"step": counter, **empty}
        self.steps = steps


KINDS: Mapping[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""The moments that each optimizer keeps of a parameter."""


def _made(section: OptimSection, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if section.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=section.lr, weight_decay=section.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
