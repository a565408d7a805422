"""The reward function for GSM8K."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin, plugin_section


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the number after the last `####`, or the last number if the method is `flexible`; None if there is no number."""
    found = _rule(method, 0.0, 1.0).compute_score(None, solution_str, "0")
    pred: str | None = found["pred"]
    return pred


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right number, `format_score` for a wrong number, and 0 if the response has no number."""
    rule = _rule(method, format_score, score)
    return float(rule.compute_score(None, solution_str, ground_truth)["score"])


def _rule(method: str, format_score: float, score: float) -> Any:
    kind, name = "reward_function", "gsm8k"
    config = plugin_section(kind, name, method=method, format_score=format_score, score=score)
    return make_plugin(PluginRef(kind=kind, name=name, config=config), PluginContext())
