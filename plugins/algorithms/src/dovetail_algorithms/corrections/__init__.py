"""Rollout corrections: one implementation, and the presets that the field knows by name."""
