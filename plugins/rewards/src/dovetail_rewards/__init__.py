"""Reward managers and reward functions."""
