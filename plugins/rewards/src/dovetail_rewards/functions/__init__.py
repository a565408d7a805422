"""Reward functions: rules that score one response."""
