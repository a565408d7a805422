"""Stages of a step that compute columns between the rollout and the estimator or update."""
