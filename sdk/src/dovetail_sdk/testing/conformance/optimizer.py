"""The suites of optimizers and of learning-rate schedules: the behaviour that engines and checkpoints rely on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor, nn

from dovetail.interfaces import Optimizer, Schedule
from dovetail_sdk.testing.conformance.plugin import PluginConformance

MATRICES = frozenset({"matrix", "tall"})
_SHAPES = {"matrix": (64, 128), "tall": (96, 32), "embedding": (64, 96), "norm": (7,), "bias": (3,)}


class OptimizerConformance(PluginConformance):
    """Conformance suite for optimizers: subclass it and set `plugin`."""

    kind = "optimizer"
    plugin: ClassVar[type[Optimizer]]
    steps: ClassVar[int] = 3
    """Number of steps before the optimizer state is saved."""

    def make_config(self) -> Any:
        """Return the config under test, with a learning rate large enough to change float32 parameters visibly."""
        config = super().make_config()
        return attrs.evolve(config, lr=max(config.lr, 1e-2))

    def parameters(self, seed: int = 0) -> dict[str, nn.Parameter]:
        """Return parameters of several shapes, float32, by name."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in _SHAPES.items()
        }

    def built(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[Optimizer, Sequence[torch.optim.Optimizer]]:
        """Return the plugin and the torch optimizers that it builds for these parameters."""
        plugin: Optimizer = self.make()
        return plugin, plugin.build(parameters, MATRICES)

    def descend(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        steps: Sequence[int],
    ) -> None:
        """Take optimizer steps with gradients that depend only on the step number; at every second step, the bias has no gradient."""
        for step in steps:
            generator = torch.Generator().manual_seed(100 + step)
            for name, parameter in parameters.items():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if name == "bias" and step % 2 else noise
            for optimizer in optimizers:
                optimizer.step()

    def state(
        self,
        plugin: Optimizer,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
    ) -> dict[str, Tensor]:
        """Return every optimizer state tensor that a checkpoint stores, of any shape, by kind of state and parameter."""
        return {
            f"{kind}.{part}.{name}": tensor
            for name, parameter in parameters.items()
            for optimizer in optimizers
            for kind, value in optimizer.state.get(parameter, {}).items()
            for part, tensor in plugin.state_tensors(torch.as_tensor(value)).items()
        }

    def test_every_parameter_is_in_one_group_with_a_peak_learning_rate(self) -> None:
        parameters = self.parameters()
        _, optimizers = self.built(parameters)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        assert sorted(id(p) for group in groups for p in group["params"]) == sorted(
            map(id, parameters.values())
        )
        assert all(float(group["lr"]) > 0 for group in groups)

    def test_it_descends(self) -> None:
        parameters = self.parameters()
        _, optimizers = self.built(parameters)

        def loss() -> Tensor:
            return torch.stack([(p**2).mean() for p in parameters.values()]).sum()

        before = loss().item()
        for _ in range(20):
            for parameter in parameters.values():
                parameter.grad = None
            loss().backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
        assert loss().item() < before

    def test_steps_without_gradient_and_learning_rate_make_the_state_and_change_no_weight(
        self,
    ) -> None:
        parameters, others = self.parameters(), self.parameters()
        plugin, optimizers = self.built(parameters)
        self.descend(optimizers, parameters, range(1))
        fresh, unused = self.built(others)
        for optimizer in unused:
            for group in optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"]) * 0
        for parameter in others.values():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in unused:
            optimizer.step()
        expected, found = (
            {name: (t.shape, t.dtype) for name, t in self.state(*each).items()}
            for each in ((plugin, optimizers, parameters), (fresh, unused, others))
        )
        assert found == expected
        for name, start in self.parameters().items():
            torch.testing.assert_close(others[name].detach(), start.detach(), rtol=0, atol=0)

    def test_the_state_tensors_are_all_that_the_next_step_depends_on(self) -> None:
        parameters = self.parameters()
        plugin, optimizers = self.built(parameters)
        self.descend(optimizers, parameters, range(self.steps))
        others = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        other_plugin, resumed = self.built(others)
        self.descend(resumed, others, [0])
        with torch.no_grad():
            for name, parameter in parameters.items():
                others[name].copy_(parameter)
            kept = self.state(plugin, optimizers, parameters)
            for name, tensor in self.state(other_plugin, resumed, others).items():
                tensor.copy_(kept[name])
        self.descend(optimizers, parameters, range(self.steps, self.steps + 2))
        self.descend(resumed, others, range(self.steps, self.steps + 2))
        for name, parameter in parameters.items():
            torch.testing.assert_close(others[name], parameter, rtol=0, atol=0, msg=name)

    def test_the_estimate_of_its_state_is_near_what_it_keeps(self) -> None:
        parameters = self.parameters()
        plugin, optimizers = self.built(parameters)
        self.descend(optimizers, parameters, [0])
        config = self.make_config()
        for name in ("matrix", "embedding"):
            sizes = {
                key: tensor.nbytes
                for key, tensor in self.state(plugin, optimizers, parameters).items()
                if key.endswith(f".{name}") and tensor.dim()
            }
            told = self.plugin.state_bytes(config, matrix=name in MATRICES)
            assert sum(sizes.values()) / parameters[name].numel() == pytest.approx(told, abs=0.2)


class ScheduleConformance(PluginConformance):
    """Conformance suite for learning-rate schedules: subclass it and set `plugin`."""

    kind = "schedule"
    plugin: ClassVar[type[Schedule]]

    def shares(self, last: int, needs_end: bool = True) -> list[float]:
        """Return the schedule's share at every step from 0 to `last`: 1 for the peak learning rate, 0 for the lowest.

        Args:
            last: the last step.
            needs_end: whether the schedule gets the number of the last step.
        """
        schedule: Schedule = self.make()
        return [schedule.share(step, last if needs_end else None) for step in range(last + 1)]

    @pytest.mark.parametrize("last", [1, 2, 7, 1000])
    def test_shares_are_numbers_from_0_to_1_and_start_at_the_peak(self, last: int) -> None:
        shares = self.shares(last)
        assert shares[0] == 1
        assert all(math.isfinite(share) and 0 <= share <= 1 for share in shares)

    def test_a_share_follows_from_the_step_alone(self) -> None:
        used: Schedule = self.make()
        backwards = [used.share(step, 50) for step in reversed(range(51))]
        assert backwards[::-1] == self.shares(50)

    def test_a_schedule_without_an_end_is_the_same_where_the_end_is_known(self) -> None:
        if self.plugin.needs_end:
            pytest.skip("the schedule needs to know the last step")
        assert self.shares(50, needs_end=False) == self.shares(50)
