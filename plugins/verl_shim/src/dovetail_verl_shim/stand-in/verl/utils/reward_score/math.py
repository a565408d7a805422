"""Alias of `math_reward`, the module's older name in verl."""

from verl.utils.reward_score.math_reward import compute_score, last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "remove_boxed"]
