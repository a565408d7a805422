"""The chosen algorithm in the words of the plan: plugins with their settings, penalties with their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dovetail.planning.requirements import Demands
from dovetail.planning.resolved_plugins import Chosen
from dovetail.sections import RunConfig
from dovetail.sections.fields import PluginSection

_SELECTORS = frozenset(attrs.fields_dict(PluginSection))


def with_settings(plugin: Chosen, *, changed_only: bool = False) -> str:
    """A plugin's name with its settings in brackets, such as `gae (gamma 0.99, lam 0.95)`.

    Args:
        plugin: the plugin and its config.
        changed_only: leave out what is at its default.
    """
    told = [
        f"{name} {_value(value)}"
        for name, value, default in settings(plugin.config)
        if value is not None and not (changed_only and value == default)
    ]
    return f"{plugin.ref.name} ({', '.join(told)})" if told else plugin.ref.name


def settings(config: PluginSection) -> Iterator[tuple[str, Any, Any]]:
    """The fields of a plugin's own: name, value and default (`attrs.NOTHING` where there is none)."""
    for field in attrs.fields(type(config)):
        if field.name not in _SELECTORS:
            default: Any = field.default
            if isinstance(default, attrs.Factory) and not default.takes_self:  # type: ignore[arg-type]
                default = default.factory()
            yield field.name, getattr(config, field.name), default


def update_words(config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands) -> str:
    """What the actor's update minimises: loss, aggregation, correction, KL penalty, entropy bonus."""
    algorithm = config.algorithm
    words = [
        with_settings(chosen["algorithm.policy_loss"]),
        with_settings(chosen["algorithm.loss_aggregation"]),
    ]
    if demands.correct_within:
        words.append(f"corrected by {chosen['algorithm.rollout_correction'].ref.name}")
    if algorithm.kl.in_loss is not None and algorithm.kl.in_loss.coef:
        words.append(f"KL {_kl(config, chosen, 'in_loss')} in the loss")
    if algorithm.entropy.coef:
        words.append(f"entropy bonus {_value(algorithm.entropy.coef)}")
    return ", ".join(words)


def shaping_words(config: RunConfig, chosen: Mapping[str, Chosen]) -> str:
    """What is taken off the rewards before advantages are estimated; empty where nothing is."""
    penalty, kl = config.algorithm.overlong_penalty, config.algorithm.kl.in_reward
    words = []
    if penalty is not None:
        words.append(
            f"algorithm.overlong_penalty (buffer {penalty.buffer}, factor {_value(penalty.factor)})"
        )
    if kl is not None and kl.coef:
        words.append(f"algorithm.kl.in_reward ({_kl(config, chosen, 'in_reward')})")
    return ", ".join(words)


def clips(loss: Chosen) -> bool:
    """Whether a loss bounds a ratio."""
    return any(name.startswith("clip") for name, _, _ in settings(loss.config))


def _kl(config: RunConfig, chosen: Mapping[str, Chosen], place: str) -> str:
    """A KL penalty's estimator, weight and, where it moves, its controller."""
    kl = getattr(config.algorithm.kl, place)
    controller = chosen[f"algorithm.kl.{place}.controller"].ref.name
    moves = "" if controller == "fixed" else f" ({controller})"
    return f"{kl.estimator} {_value(kl.coef)}{moves}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)
