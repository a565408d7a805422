"""Reward managers: how reward functions are run."""
