"""Stages of a step between the rollout and the update, which add columns to the batch or form preference pairs from its samples."""
