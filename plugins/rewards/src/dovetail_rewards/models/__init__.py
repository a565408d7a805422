"""Reward models: scores by a model that reads prompt and response."""
