"""Numerics of stages, objectives and losses: masked statistics, KL, loss aggregation, rollout corrections."""
