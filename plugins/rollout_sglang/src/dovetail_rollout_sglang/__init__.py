"""Rollouts by SGLang: servers that a run starts, or that are there."""
