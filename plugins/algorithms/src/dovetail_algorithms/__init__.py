"""Advantage estimators, policy losses, objectives, rollout corrections, sample filters and presets."""
