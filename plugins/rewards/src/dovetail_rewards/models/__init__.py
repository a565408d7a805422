"""Reward models: models that score a response to a prompt."""
