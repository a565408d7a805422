"""The optimizer: fused AdamW over float32 weights, a schedule that is a function of the step, gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.config.sections import OptimSection, TrainingSection
from dovetail.errors import CheckpointError, ConfigError, NumericsError


def learning_rate(section: OptimSection, step: int, total_steps: int | None) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up rises linearly to the peak; `linear` and `cosine` then fall to `min_lr_ratio` at the last step.

    Raises:
        ConfigError: the schedule falls, and the number of steps is unknown.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    if total_steps is None:
        raise ConfigError(
            f"optim.schedule {section.schedule!r} needs to know how many steps the run will take",
            hint="use optim.schedule=constant, or set trainer.total_steps",
        )
    # The peak is reached in the last step of warm-up, or in the first step where there is none.
    peak = max(section.warmup_steps - 1, 0)
    done = min(max(step - peak, 0) / max(total_steps - 1 - peak, 1), 1.0)
    left = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)


class Optimizer:
    """AdamW with its place in the schedule."""

    def __init__(
        self, model: nn.Module, training: TrainingSection, total_steps: int | None
    ) -> None:
        self.steps = 0
        self._training = training
        self._total_steps = total_steps
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optim = training.optim
        self._adamw = torch.optim.AdamW(
            self._named.values(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def step(self, finite: Tensor) -> tuple[float, float]:
        """Take exactly one step with the gradients that have gathered, and drop them.

        Args:
            finite: bool [], whether the losses that they come from are finite. It is fetched with the norm.

        Returns:
            The gradient's norm before clipping, and the learning rate.

        Raises:
            NumericsError: the losses or the norm are not finite; weights and optimizer are as before.
        """
        lr = learning_rate(self._training.optim, self.steps, self._total_steps)
        norm, whole = self._clip(finite)
        if not whole or not math.isfinite(norm):
            self._adamw.zero_grad()
            what = f"gradient norm of optimizer step {self.steps} is {norm}"
            if not whole:
                what = f"loss of optimizer step {self.steps}, or an output of the model that it is made of, is not finite"
            raise NumericsError(
                f"the {what}; no step was taken",
                hint="lower the learning rate, and look at the loss, ratio and reward metrics of the steps before",
            )
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad()
        self.steps += 1
        return norm, lr

    def _clip(self, finite: Tensor) -> tuple[float, bool]:
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        if not gradients:
            return 0.0, bool(finite)
        norm = torch.nn.utils.get_total_norm(gradients)
        value, whole = torch.stack([norm, finite.to(norm)]).tolist()
        if 0 < self._training.grad_clip < value < math.inf:
            torch.nn.utils.clip_grads_with_norm_(
                self._named.values(), self._training.grad_clip, norm
            )
        return value, bool(whole)

    def discard_gradients(self) -> None:
        """Drop what a failed backward pass has left."""
        self._adamw.zero_grad()

    def move(self, device: torch.device) -> None:
        """Move the moments to a device."""
        for state in self._adamw.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    def state(self) -> dict[str, Any]:
        """Steps taken, and each parameter's moments by name."""
        moments = {
            name: dict(self._adamw.state[parameter])
            for name, parameter in self._named.items()
            if parameter in self._adamw.state
        }
        return {"steps": self.steps, "moments": moments}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, on the parameters' devices.

        Raises:
            CheckpointError: it belongs to another model.
        """
        moments: Mapping[str, Mapping[str, Any]] = state["moments"]
        unknown = sorted(moments.keys() - self._named.keys())
        if unknown:
            raise CheckpointError(
                f"the optimizer state is of another model: it holds {unknown[0]!r}",
                hint="resume with the model that the checkpoint was made with",
            )
        self._adamw.state.clear()
        for name, values in moments.items():
            parameter = self._named[name]
            self._adamw.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
        self.steps = int(state["steps"])
