"""Texts with which the plan describes the algorithm: plugins with their settings, penalties with their weights."""

from __future__ import annotations

from dovetail.interfaces import PlanFacts, SelectedPlugin
from dovetail.sections import PluginSection, own_fields
from dovetail_stages.algorithm import corrects_within


def with_settings(plugin: SelectedPlugin, *, changed_only: bool = False) -> str:
    """Return a plugin's name with its settings in brackets, such as `gae (gamma 0.99, lam 0.95)`.

    Args:
        plugin: the plugin and its config.
        changed_only: whether to leave out settings at their default.
    """
    shown = [
        f"{name} {_value(value)}"
        for name, value, default in own_fields(plugin.config)
        if value is not None and not (changed_only and value == default)
    ]
    return f"{plugin.ref.name} ({', '.join(shown)})" if shown else plugin.ref.name


def update_words(facts: PlanFacts) -> str:
    """Return a text that describes the actor's update: policy loss, aggregation, correction, KL penalty and entropy bonus.

    If the config sets `actor.objective`, the text describes that objective alone.
    """
    algorithm, plugins = facts.config.algorithm, facts.plugins
    if facts.config.actor.objective is not None:
        return with_settings(plugins["actor.objective"])
    words = [
        with_settings(plugins["algorithm.policy_loss"]),
        with_settings(plugins["algorithm.loss_aggregation"]),
    ]
    if corrects_within(facts):
        words.append(f"corrected by {plugins['algorithm.rollout_correction'].ref.name}")
    if algorithm.kl.in_loss is not None and algorithm.kl.in_loss.coef:
        words.append(f"KL {kl_words(facts, 'in_loss')} in the loss")
    if algorithm.entropy.coef:
        words.append(f"entropy bonus {_value(algorithm.entropy.coef)}")
    return ", ".join(words)


def clips(loss: SelectedPlugin) -> bool:
    """Return whether a loss has a setting that bounds its ratio."""
    return any(name.startswith("clip") for name, _, _ in own_fields(loss.config))


def kl_words(facts: PlanFacts, place: str) -> str:
    """Return a text with a KL penalty's estimator, its weight and, unless it is `fixed`, the controller of the weight.

    Args:
        facts: the facts of the plan, with the config.
        place: which penalty, by its key below `algorithm.kl`: `in_loss` or `in_reward`.
    """
    kl = getattr(facts.config.algorithm.kl, place)
    controller = facts.plugins[f"algorithm.kl.{place}.controller"].ref.name
    moves = "" if controller == "fixed" else f" ({controller})"
    return f"{kl.estimator} {_value(kl.coef)}{moves}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, PluginSection):
        return str(value.name or value.attribute)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)
