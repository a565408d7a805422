"""Scores by `data_source`, from Dovetail's reward functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> Any:
    """Return the result of Dovetail's reward function named `data_source`: a number, or a mapping with `score`.

    Raises:
        NotImplementedError: there is no reward function for the data source.
    """
    return _rule(data_source).compute_score(data_source, solution_str, ground_truth, extra_info)


@lru_cache(maxsize=64)
def _rule(name: str) -> Any:
    from dovetail.errors import PluginNotFoundError
    from dovetail.interfaces import PluginContext, PluginRef
    from dovetail.plugins import make_plugin

    known = "math_dapo" if name.startswith("aime") else name
    try:
        return make_plugin(PluginRef(kind="reward_function", name=known), PluginContext())
    except PluginNotFoundError as error:
        raise NotImplementedError(
            f"data_source {name!r} has no reward function in Dovetail; give one of your own in `reward.functions`"
        ) from error
