"""Stages of a step: what an algorithm computes between the rollout and its estimator."""
